"""Published measurements that nothing is fitted to and no range is made of: the calibrated model as a user asks it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from axonn_plugins.planner import corpus, machine, rates, validate

ROWS = [row for path in sorted(Path(__file__).with_name("apart").glob("*.toml")) for row in corpus.read(path)]
NEW = ("float8_fsdp2_2024", "kempner_forge", "nemo")
"""Tables of 2024 to 2026 that are not torchtitan's, whose recomputation of single operations is not modelled."""


@pytest.fixture(scope="module")
def compared() -> list[validate.Compared]:
    return [validate.compare(row) for row in ROWS]


def mean(found: Sequence[validate.Compared]) -> float:
    return sum(abs(one.error) for one in found) / len(found)


def test_no_row_is_in_the_corpus() -> None:
    def key(row: corpus.Measurement) -> tuple[object, ...]:
        return row.framework, row.machine, row.gpus, row.batch, row.sequence, row.setting, row.value

    assert not {key(row) for row in ROWS} & {key(row) for row in corpus.load()}
    assert len({(*key(row), row.model) for row in ROWS}) == len(ROWS) > 130


def test_errors_and_ranges(compared: list[validate.Compared]) -> None:
    bf16 = [one for one in compared if not one.row.setting.fp8]
    for chosen in (
        compared,
        bf16,
        [one for one in bf16 if one.row.machine == "h100"],
        [one for one in bf16 if one.row.machine == "h100" and one.row.table != "llm_foundry_h100_rest"],
    ):
        assert len(chosen) > 30 and mean(chosen) <= 0.20
        assert sum(one.inside for one in chosen) / len(chosen) >= 0.70


def test_steps_in_8_bits_are_predicted_too_long(compared: list[validate.Compared]) -> None:
    """What the README says, too: no fit knows NVIDIA's own stacks."""
    eight = [one for one in compared if one.row.setting.fp8]
    assert 0.25 < mean(eight) < 0.30
    assert sum(one.error for one in eight) / len(eight) > 0.15


def test_new_systems_have_the_latest_attention(compared: list[validate.Compared]) -> None:
    load = machine.load
    with patch.object(machine, "load", lambda name: rates.latest_attention(load(name))):
        latest = [validate.compare(row) for row in ROWS if row.table in NEW]
    assert all(one.inside for one in latest) and mean(latest) <= 0.10
    assert mean([one for one in compared if one.row.table in NEW]) > 0.15
