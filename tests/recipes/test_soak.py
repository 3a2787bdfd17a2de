"""The soak test: what it asserts of a disturbed job, and, thoroughly, one such job."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from axonn_plugins.cli import main
from axonn_plugins.cluster import lacking
from axonn_recipes.soak_test import verdict
from axonn_recipes.soak_test.faults import KINDS, drawn


def row(step: int, start: int = 1, loss: float = 1.0) -> dict:
    return {"step": step, "start": start, "loss": loss, "grid": [1, 1, 1, 2]}


def test_losses_are_the_undisturbed_run_s() -> None:
    wanted = {1: 1.0, 2: 1.0, 3: 1.0}
    assert verdict.wrong([row(1), row(2), row(2, 2), row(3, 2)], wanted, 3) == []
    assert "step 2: loss 1.00001" in verdict.wrong([row(1), row(2, 1, 1.00001), row(3)], wanted, 3)[0]
    assert "step 2: loss nan" in verdict.wrong([row(1), row(2, 1, float("nan")), row(3)], wanted, 3)[0]
    assert verdict.wrong([row(1), row(3)], wanted, 3) == ["steps that were never taken: [2]"]


def test_starts_go_on_from_the_last_complete_checkpoint() -> None:
    steps = [row(step) for step in range(1, 8)]
    assert verdict.lost([*steps, row(6, 2)], 5) == ([], 2, 2)
    assert verdict.lost([*steps, row(8, 2)], 5)[0] == ["after step 7 a start went on with step 8, not from [5]"]
    assert verdict.lost([*steps, row(1, 2)], 5)[0] == ["after step 7 a start went on with step 1, not from [5]"]
    # Noted, but killed while it was saved.
    assert verdict.lost([*steps[:5], row(1, 2)], 5)[0] == verdict.lost([*steps[:5], row(6, 2)], 5)[0] == []
    assert verdict.lost([row(2)], 5)[0] == ["the first start began with step 2"]


def test_growth_is_told_from_noise() -> None:
    samples = verdict.Samples()
    flat = [(100 * 2**20 + number % 2 * 2**20, 20 + number % 3) for number in range(30)]
    samples.of[1] = flat
    samples.of[2] = [(size + number * 2**22, files) for number, (size, files) in enumerate(flat)]
    samples.of[3] = [(size, files + number) for number, (size, files) in enumerate(flat)]
    samples.of[4] = samples.of[3][:5]  # too short a life
    grown = samples.grown()
    assert [line.split()[1] for line in grown] == ["2", "3"] and "MiB" in grown[0] and "files" in grown[1]


def test_faults_are_those_of_the_seed() -> None:
    first, again, other = (list(itertools.islice(drawn(seed, 3, 10.0), 21)) for seed in (1, 1, 2))
    assert first == again != other
    assert {fault.kind for fault in first[:7]} == set(KINDS) and {fault.node for fault in first} == {0, 1, 2}


@pytest.mark.thorough
@pytest.mark.skipif(lacking() is not None, reason=str(lacking()))
def test_a_job_under_faults(tmp_path: Path) -> None:
    words = ["--minutes", "0.1", "--steps", "40", "--every", "12", "--seed", "4"]
    assert main(["test", "soak", *words, "--runs", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / "soak" / "report.json").read_text())
    assert kept["jobs"][0]["faults"] and not kept["jobs"][0]["problems"]
    assert "nothing lost, nothing wrong" in (tmp_path / "soak" / "report.txt").read_text()
