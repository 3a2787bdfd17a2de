"""A few hundred random cases; ``python -m tests.fuzz`` draws as many as wished."""

from __future__ import annotations

import pytest

from tests.fuzz.cases import case
from tests.fuzz.driver import WORLDS, run_cases

CASES = 240


def test_a_number_draws_the_same_case_again() -> None:
    assert case(3, 17, 4) == case(3, 17, 4) != case(4, 17, 4)


@pytest.mark.timeout(1200)
def test_random_models_equal_the_serial_model() -> None:
    found = run_cases(0, range(CASES))
    print(found)
    assert not found.bad, "\n".join(found.bad)
    equal = [number for number, told in found.told.items() if told == "equal"]
    assert len(found.told) == CASES and len(equal) > CASES // 2  # a refusal shows nothing
    assert {found.cases[number].grid.world for number in equal} == set(WORLDS)
