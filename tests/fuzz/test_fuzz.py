"""Some random cases in every run; ``python -m tests.fuzz`` draws as many as wished."""

from __future__ import annotations

import time
from collections.abc import Collection

import pytest
import torch

from axonn_tp import Mesh
from tests.fuzz import driver
from tests.fuzz.cases import Case, case, run
from tests.fuzz.driver import WORLDS, run_cases
from tests.matrix import thorough


def test_a_number_draws_the_same_case_again() -> None:
    assert case(3, 17, 4) == case(3, 17, 4) != case(4, 17, 4)


@pytest.mark.parametrize("numbers", [(2, 6, 13), thorough(range(120))], ids=len)
def test_random_models_equal_the_serial_model(numbers: Collection[int]) -> None:
    found = run_cases(0, numbers)
    print(found)
    assert not found.bad, "\n".join(found.bad)
    equal = [number for number, told in found.told.items() if told == "equal"]
    assert len(found.told) == len(numbers) and len(equal) > len(numbers) // 2  # a refusal shows nothing
    assert {found.cases[number].grid.world for number in equal} == set(WORLDS)


@pytest.mark.thorough  # waits for its time to pass
def test_a_case_that_hangs_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(one: Case, mesh: Mesh) -> str:
        if one.number[1] == 3 and torch.distributed.get_rank() == 1:
            time.sleep(1000)
        return run(one, mesh)

    monkeypatch.setattr(driver, "run", stuck)
    found = run_cases(0, (0, 3, 6), seconds=15)
    assert found.told[3] == "hangs" and "hangs" not in (found.told[0], found.told[6]) and len(found.bad) == 1
