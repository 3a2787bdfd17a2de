"""``axonn bench compile``: one short run of all sides, by a compiler that takes no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axonn_plugins.cli import main
from axonn_recipes.bench_compile.recipe import SIDES


def test_sides_learn_alike_and_are_timed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = "--layers 1 --hidden 16 --heads 2 --context 6 --batch 4 --dtype float64 --backend eager --rounds 1"
    words += " --ranks 2 --gx 2 --gy 1 --gz 1"
    assert main(["bench", "compile", *words.split(), "--runs", str(tmp_path)]) == 0
    said = capfd.readouterr().out
    sides = json.loads((tmp_path / "bench_compile" / "results.json").read_text())
    assert [side["name"] for side in sides] == list(SIDES)
    for side in sides:
        assert len(side["seconds"]) == 1 and min(side["seconds"]) > 0 and side["name"] in said
        assert side["losses"] == pytest.approx(sides[0]["losses"], rel=1e-9)
    assert sides[0]["losses"][-1] < sides[0]["losses"][0]


def test_heads_must_divide(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compile", "--hidden", "10", "--heads", "3"]) == 2
    assert "--heads" in capsys.readouterr().err


def test_the_grid_must_divide_ranks_and_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compile", "--ranks", "3"]) == 2
    assert "--gx, --gy and --gz: gx*gy*gz = 2*1*1 = 2 does not divide the 3 ranks" in capsys.readouterr().err
    assert main(["bench", "compile", "--ranks", "6", "--gz", "3", "--batch", "4"]) == 2
    assert "--batch 4 does not divide by gz*gdata = 3" in capsys.readouterr().err
