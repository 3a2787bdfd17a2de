"""The recipe of the planner: what is published comes out, files are written, mistakes are refused."""

import csv
from pathlib import Path

import pytest

from axonn_plugins.cli import main
from axonn_recipes.planner.recipe import EXPERIMENTS

DIFFERING = {"figure_1": 1, "figure_2b": 1, "megatron": 1}
"""How many statements of the text differ from the published results, by experiment."""
QUICK = [name for name in EXPERIMENTS if name not in ("appendix_4", "time_to_solution")]


@pytest.mark.parametrize("name", QUICK)
def test_what_the_text_says(name: str) -> None:
    outcome = EXPERIMENTS[name]()
    assert outcome.rows and len({tuple(row) for row in outcome.rows}) == 1
    differing = [check for check in outcome.checks if not check.agrees]
    assert len(differing) == DIFFERING.get(name, 0), differing


def test_megatrons_published_times() -> None:
    rows = EXPERIMENTS["megatron"]().rows
    for what, mean, largest in (
        ("as 004", 0.169, 0.283),
        ("whole", 0.125, 0.223),
        ("whole, plain attention", 0.070, 0.091),
    ):
        errors = [row[f"error, {what}"] for row in rows]
        assert len(errors) == 8 and all(-largest < error < 0 for error in errors)
        assert sum(map(abs, errors)) / 8 == pytest.approx(mean, abs=0.001)


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["figure_1", "figure_4a", "appendix_1", "appendix_6a", "ranks"]
    assert main(["train", "planner", *words, "--runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "published: 1024 GPUs: (nNVS1, nNVSd, nNVSp) = (2, 2, 2); here: (2, 2, 2)" in out
    folder = tmp_path / "planner"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{word}.{end}" for word in words for end in ("csv", "png")
    )
    rows = list(csv.DictReader((folder / "figure_4a.csv").open()))
    assert [row["GPUs"] for row in rows] == [str(128 * 2**i) for i in range(8)]
    assert all((folder / f"{word}.png").stat().st_size > 5000 for word in words)


def test_dry_run_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "planner", "--dry-run", "--runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("\n") == len(EXPERIMENTS)
    assert not list(tmp_path.iterdir())


def test_a_wrong_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "planner", "figure_7"]) == 2
    assert '"figure_7" is not an experiment; use "figure_' in capsys.readouterr().err
