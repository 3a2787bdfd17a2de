"""The pipeline benchmark: what it is asked, what it says, and a small run."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from axonn_plugins.cli import main
from axonn_plugins.cli.options import read
from axonn_plugins.cluster import lacking
from axonn_plugins.pipeline.events import Event
from axonn_plugins.pipeline.timeline import mean_split, split
from axonn_recipes.bench_pipeline.overlap import Overlap, hidden
from axonn_recipes.bench_pipeline.report import BEST_TORCH, overlap_text, ratios, results, text
from axonn_recipes.bench_pipeline.settings import SCENARIOS, Options, Settings, resolve
from axonn_recipes.bench_pipeline.sides import BLOCKS, OURS, STOCK, TORCH
from axonn_recipes.bench_pipeline.work import Pace

needs_cluster = pytest.mark.skipif(lacking() is not None, reason=str(lacking()))


def asked(*words: str) -> list[Settings]:
    return resolve(read(Options, words))


def test_runs_that_are_asked_for() -> None:
    assert [run.scenario for run in asked()] == list(SCENARIOS)
    assert [run.link_jitter for run in asked()] == [0, 0, 0.5, 0]
    sweep = asked("--figure", "stages", "--ranks", "8", "--layers", "16")
    assert [(run.stages, run.microbatches) for run in sweep] == [(2, 4), (4, 8), (8, 16)]
    assert [run.ranks for run in asked("--figure", "scaling", "--ranks", "8", "--layers", "16")] == [2, 4, 8]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--layers", "6"), "--layers 6 do not divide by the 8 parts"),
        (("--ranks", "1", "--layers", "2"), "--ranks 1 make no pipeline"),
        (("--ranks", "1", "--figure", "memory"), "--ranks 1 make no pipeline for --figure memory; give 2 or more"),
        (("--ranks", "3", "--figure", "scaling"), "--ranks 3 make no pipeline for --figure scaling; give an even"),
        (("--figure", "coarsening", "--parameters", "100"), "--parameters 100 are too few to be timed; give 4,000"),
        (("--jitter", "2"), "--jitter 2.0 is not between 0 and 1"),
        (("--figure", "stages", "--microbatches", "7"), "--microbatches 7 do not divide by the 2 pipelines"),
        (("--rounds", "0"), "--rounds 0 is not at least 1"),
    ],
)
def test_mistakes_are_one_sentence(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "pipeline", *words, "--dry-run"]) == 2
    assert said in capsys.readouterr().err


def test_passes_take_what_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr("time.perf_counter", lambda: sum(slept))
    pace, again = Pace(1.0, 0.5, 2.0), Pace(1.0, 0.5, 2.0)
    for one in (pace, again):
        one.begin(3)
        for _ in range(50):
            one.spend(0, "forward")
    assert slept[:50] == pytest.approx(slept[50:]) and len(set(slept[:50])) == 50
    assert 1 <= min(slept) < 1.5 and 2.5 < max(slept) <= 3
    even = Pace(1.0)
    even.worked(sum(slept) - 0.25)
    even.spend(0, "forward")
    even.spend(0, "forward")
    assert slept[-2:] == pytest.approx([0.75, 1.0])


def test_split_and_ratios() -> None:
    waits = [Event("wait", -1, 2.0, 4.5), Event("transit", -1, 4.5, 5.0)]
    events = [Event("forward", 0, 1.0, 2.0), *waits, Event("backward", 0, 5.0, 7.0)]
    assert split(events) == {"compute": 3, "point-to-point": 0.5, "bubble": 2.5, "collective": 0, "optimizer": 0}
    late = [Event("reduce", -1, 7.0, 8.0)]
    assert mean_split([events, late])["bubble"] == (3.5 + 6) / 2
    from axonn_recipes.bench_pipeline.measure import Side

    sides = [Side(OURS, [1.0], [1.0, 2.0]), Side(STOCK, [1.0], [1.5, 3.0]), Side("torch 1F1B", [1.0], [1.0, 2.2])]
    found = ratios(sides)
    assert found[STOCK]["median"] == 1.5 and found[BEST_TORCH]["median"] == pytest.approx(1.05)
    said = text(results([(Settings(), sides)]))
    assert "deepspeed / message driven: 1.50 (quartiles 1.50 to 1.50; asked: 1.25, met)" in said


def test_hidden_share() -> None:
    half = Overlap(1, [2.0], [1.0], [3.0], [2.5])
    assert hidden(half) == [0.5] and hidden(Overlap(2, [2.0], [1.0], [3.0], [2.0])) == [1.0]
    assert "best at 2: 100%" in overlap_text([half, Overlap(2, [2.0], [1.0], [3.0], [2.0])])


@needs_cluster
def test_a_small_run(tmp_path: Path) -> None:
    """All sides learn alike, and leave their files."""
    words = [
        "--ranks",
        "2",
        "--layers",
        "4",
        "--microbatches",
        "4",
        "--milliseconds",
        "0.5",
        "--rounds",
        "1",
        "--tokens",
        "4",
    ]
    where = ["--width", "8", "--scenario", "jitter in links", "--name", "small", "--runs", str(tmp_path)]
    assert main(["bench", "pipeline", *words, *where]) == 0
    numbers = json.loads((tmp_path / "small" / "results.json").read_text())
    assert [side["name"] for side in numbers["runs"][0]["sides"]] == [*BLOCKS, *TORCH]
    with (tmp_path / "small" / "schedules.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(BLOCKS) + len(TORCH)
    assert (tmp_path / "small" / "timeline.png").is_file() and (tmp_path / "small" / "schedules.png").is_file()
