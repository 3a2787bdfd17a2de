"""The benchmark of mixtures: every side runs and learns the same, and what is reported is what was measured."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from axonn_plugins.cli import main

TINY = [
    "--layers",
    "1",
    "--hidden",
    "16",
    "--heads",
    "2",
    "--context",
    "8",
    "--batch",
    "4",
    "--experts",
    "4",
    "--width",
    "8",
]
SIDES = {
    "hf": (
        ["--peers", "2,2", "--ours", "1,2,2"],
        ["AutoEP and AutoTP, 2, experts over 2", "ours, x1 z2, experts over 2"],
    ),
    "megatron": (["--peers", "1,2", "--ours", "2,1,1"], ["Megatron, 1, experts over 2", "ours, x2 z1, experts over 1"]),
}


@pytest.mark.parametrize("model", SIDES)
def test_sides_run_and_are_reported(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec({"hf": "transformers", "megatron": "megatron"}[model]) is None:
        pytest.skip(f"what --model {model} trains is not installed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    words, names = SIDES[model]
    more = ["--local", "--nodes", "1", "--rounds", "1", "--steps", "2", "--backend", "pccl", "--runs", str(tmp_path)]
    assert main(["bench", "moe", "--model", model, *TINY, *words, *more]) == 0
    text, folder = capfd.readouterr().out, tmp_path / "bench_moe"
    assert {file.name for file in folder.iterdir()} == {"results.json", "table.txt"}
    numbers = json.loads((folder / "results.json").read_text())
    sides = {side["name"]: side for side in numbers["sides"]}
    assert list(sides) == names
    for name, side in sides.items():
        assert name in text and side["losses"] == pytest.approx(sides[names[0]]["losses"], rel=1e-5)
        assert side["losses"][2] < side["losses"][0] and len(side["seconds"]) == 1 and side["memory_bytes"] > 0
    assert [pair["peer"] for pair in numbers["comparisons"]] == names[:1]


def test_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "moe", "--dry-run", "--model", "megatron", "--runs", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Megatron, 1, experts over 8" in text and "ours, x1 z8, experts over 8" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "0"], "nodes = 0 is not an integer from 1 to 64"),
        (["--bandwidth", "3"], "bandwidth = '3' is not a bandwidth"),
        (["--steps", "0"], "--steps 0 is not at least 1"),
        (["--k", "9"], "--k 9 is more than --experts 8"),
        (["--hidden", "30"], "--hidden 30 does not divide into --heads 8"),
        (["--peers", "2"], "--peers 2 is not 2 positive integers"),
        (["--ours", "2,4"], "--ours 2,4 is not 3 positive integers"),
        (["--ours", ""], "--ours names no side"),
        (["--ours", "3,1,1"], "ours, x3 z1, experts over 1: 3 does not divide the 8 ranks"),
        (["--ours", "2,8,1"], "ours, x2 z1, experts over 8: experts over 8 divide not both the 4 ranks"),
        (["--batch", "4"], "AutoEP and AutoTP, 1, experts over 8: --batch 4 does not divide by the 8 ranks"),
        (
            ["--model", "megatron", "--peers", "2,4"],
            "Megatron trains experts beside tensor ranks with sequence parallelism",
        ),
    ],
)
def test_mistakes_are_one_sentence(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "moe", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("axonn: error: ") and words in error and error.count("\n") == 1
