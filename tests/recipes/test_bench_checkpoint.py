"""The benchmark of checkpoints: what a run costs with them beside one without, and that none is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axonn_plugins.cli import main
from axonn_recipes.bench_checkpoint.measure import ALONE, ASYNCHRONOUS, NONE, SYNCHRONOUS, Side
from axonn_recipes.bench_checkpoint.recipe import results, text
from axonn_recipes.bench_checkpoint.settings import Settings

TINY = ["--layers", "1", "--hidden", "16", "--heads", "2", "--context", "8", "--batch", "4", "--rounds", "2"]


def test_a_small_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "checkpoint", *TINY, "--every", "2", "--runs", str(tmp_path)]) == 0
    out, folder = capfd.readouterr().out, tmp_path / "bench_checkpoint"
    assert {file.name for file in folder.iterdir()} == {"results.json", "table.txt"}
    numbers = json.loads((folder / "results.json").read_text())
    assert [side["name"] for side in numbers["sides"]] == [NONE, ASYNCHRONOUS, SYNCHRONOUS, ALONE]
    assert all(len(side["seconds"]) == len(side["processor"]) == 2 for side in numbers["sides"])
    # Of each weight 4 bytes and twice as many of its states: 12 * 16 * 16 + 13 * 16 in a block, 2 * 256 * 16, 8 * 16, and 2 * 16.
    assert numbers["bytes"] >= 12 * (12 * 256 + 13 * 16 + 512 * 16 + 8 * 16 + 32) and "MiB of tensors" in out


def test_costs_are_of_the_same_round() -> None:
    sides = [Side(NONE, [1.0, 2.0], [2.0, 4.0], [0.0, 0.0]), Side(ASYNCHRONOUS, [1.01, 2.02], [2.2, 4.4], [0.1, 0.1])]
    sides += [Side(SYNCHRONOUS, [1.5, 3.0], [3.0, 6.0], [0.4, 0.4]), Side(ALONE, [0.1, 0.2], [0.03, 0.06], [0.1, 0.1])]
    numbers = results(Settings(rounds=2), sides, 2**20)
    costs = numbers["costs"]
    assert costs["seconds"][ASYNCHRONOUS]["median"] == pytest.approx(0.01)
    assert costs["processor"][SYNCHRONOUS]["median"] == pytest.approx(0.5)
    assert costs["processor"][ALONE]["median"] == pytest.approx(0.015)
    assert text(numbers).endswith(": met")
    sides[3].processor = [0.2, 0.4]
    assert text(results(Settings(rounds=2), sides, 2**20)).endswith(": not met")


def test_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "checkpoint", "--dry-run", "--runs", str(tmp_path)]) == 0
    assert "of 20 steps each" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--every", "0"], "--every 0 is not at least 1"),
        (["--hidden", "30"], "--hidden 30 does not divide into --heads 8"),
        (["--batch", "3"], "--batch 3 does not divide by --ranks 2"),
    ],
)
def test_mistakes_are_one_sentence(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "checkpoint", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("axonn: error: ") and words in error and error.count("\n") == 1
