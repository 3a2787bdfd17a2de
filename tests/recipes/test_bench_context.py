"""The benchmark of long sequences: every side runs and learns the same, and what is reported is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axonn_plugins.cli import main
from axonn_recipes.bench_context.settings import PEERS

TINY = ["--layers", "1", "--hidden", "16", "--heads", "2", "--context", "16", "--rounds", "1"]


def test_every_side_runs_and_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    words = [*TINY, "--local", "--nodes", "1", "--ours", "1:gather 1:ring 1:heads 2:gather", "--runs", str(tmp_path)]
    assert main(["bench", "context", *words]) == 0
    text, folder = capfd.readouterr().out, tmp_path / "bench_context"
    assert {file.name for file in folder.iterdir()} == {"results.json", "table.txt"}
    numbers = json.loads((folder / "results.json").read_text())
    sides = {side["name"]: side for side in numbers["sides"]}
    assert list(sides) == [*PEERS, "ours, gather", "ours, ring", "ours, heads", "ours, x2, gather"]
    for name, side in sides.items():
        assert name in text and side["losses"] == pytest.approx(sides["ulysses"]["losses"], abs=1e-5)
        assert side["losses"][2] < side["losses"][0]
        assert len(side["seconds"]) == 1 and min(side["seconds"]) <= side["median"] <= max(side["seconds"])
        assert side["memory_bytes"] > 0 and side["bytes_inside_nodes"] > 0
    assert [pair["peer"] for pair in numbers["comparisons"]] == list(PEERS)


def test_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "context", "--dry-run", "--runs", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert (
        "8 ranks: 4 nodes of 2, gloo, latency 100us" in text and "8192 tokens" in text and not list(tmp_path.iterdir())
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "0"], "nodes = 0 is not an integer from 1 to 64"),
        (["--nodes", "1", "--ranks-per-node", "1"], "has nobody to share a sequence with"),
        (["--context", "0"], "--context 0 is not at least 1"),
        (["--context", "100"], "--context 100 is no multiple of 16"),
        (["--heads", "4"], "--heads 4 do not divide by the 8 ranks of ulysses"),
        (["--peers", "flash"], "--peers flash is not known; choose from torch-gather"),
        (["--ours", "gather"], "--ours gather is not gx:how"),
        (["--heads", "4", "--peers", "", "--ours", "1:heads"], "--ours 1:heads deals out --heads 4 among 8 ranks"),
        (["--ours", "3:ring"], "--ours 3:ring divides not both the 8 ranks and --heads 8"),
        (["--ours", ""], "--ours names no side"),
    ],
)
def test_mistakes_are_one_sentence(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "context", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("axonn: error: ") and words in error and error.count("\n") == 1
