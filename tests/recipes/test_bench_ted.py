"""The benchmark: all sides learn the same, bytes are exact, and what is reported is what was measured."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

import tests.deepspeed.training  # noqa: F401  without a kernel that takes a minute to compile
from axonn_plugins.cli import main
from axonn_plugins.cli.options import read
from axonn_plugins.config import ConfigError
from axonn_recipes.bench.output import publish
from axonn_recipes.bench.rounds import check_losses
from axonn_recipes.bench_ted import report, tiled
from axonn_recipes.bench_ted.blocking import KINDS
from axonn_recipes.bench_ted.measure import TOLERANCE, Side
from axonn_recipes.bench_ted.settings import Options, resolve
from axonn_recipes.bench_ted.sides import BASELINE, CAC, DEEPSPEED, DTD, FUSED, OVERLAP, SIDES

HIDDEN, CONTEXT, BATCH, EXPERTS = 16, 8, 4, 4
TINY = ["--layers", "2", "--hidden", str(HIDDEN), "--heads", "2", "--context", str(CONTEXT)]
TINY += ["--batch", str(BATCH), "--experts", str(EXPERTS), "--rounds", "1", "--backend", "pccl"]


def test_bytes_are_exact_and_sides_are_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "ted", *TINY, "--local", "--nodes", "2", "--runs", str(tmp_path)]
    assert main(words) == 0
    text, folder = capfd.readouterr().out, tmp_path / "bench_ted"
    assert {file.name for file in folder.iterdir()} == {"results.json", "table.txt", report.PICTURE}
    (run,) = json.loads((folder / "results.json").read_text())["runs"]
    sides = {side["name"]: side for side in run["sides"]}
    assert list(sides) == list(SIDES) and "flattened input" in text
    for name, side in sides.items():
        assert name in text and side["losses"] == pytest.approx(sides[DEEPSPEED]["losses"], abs=1e-5)
        assert len(side["seconds"]) == len(side["parts"]["all-to-all"]) == 1 and side["memory"] > 0
        assert (side["stashed"] > 0) == (name in (CAC, FUSED, OVERLAP))

    # One layer of the two has experts; tensor 2, and the experts over 2 ranks.
    activation = BATCH // 2 * CONTEXT * HIDDEN * 4  # bytes, also of the slots: capacity factor 1
    for kind, expected in {
        "all-to-all": {
            DEEPSPEED: (6, 0.5),
            BASELINE: (6, 1),
            DTD: (6, 0.5),
            CAC: (4, 0.5),
            FUSED: (4, 0.5),
            OVERLAP: (8, 0.25),
        },
        # Of two slices, those before the experts are halves, and those behind all as long as before.
        "all-gather": {
            DEEPSPEED: (6, 1),
            BASELINE: (0, 0),
            DTD: (6, 1),
            CAC: (4, 1),
            FUSED: (4, 1),
            OVERLAP: (6, Fraction(2, 3)),
        },
        "reduce-scatter": {FUSED: (2, 1), OVERLAP: (4, 0.5)},
    }.items():
        for name in SIDES:
            calls, share = expected.get(name, (0, 0))
            wanted = calls, calls * share * activation // 2  # either half of a tensor, or all of half of one, is sent
            assert (sides[name]["calls"].get(kind, 0), sides[name]["sent"].get(kind, 0)) == wanted, (name, kind)
    # A dense block's attention and feed-forward and an expert block's attention: in forward, recomputation and backward;
    # and each of a rank's two experts, which are half of the slots each.
    for name, reduced in {DEEPSPEED: 12, BASELINE: 12, DTD: 12, CAC: 8, FUSED: 6, OVERLAP: 6}.items():
        assert sides[name]["sent"]["all-reduce"] == reduced * activation, name
    assert sides[OVERLAP]["sent"]["gradients"] == sides[FUSED]["sent"]["gradients"]


def seconds(name: str, step: float, all_to_all: float, all_reduce: float, scatter: float = 0.0) -> Side:
    side = Side(name, [1.0], [step, step])
    parts = {"all-to-all": all_to_all, "all-reduce": all_reduce, "reduce-scatter": scatter}
    side.parts = {kind: [parts.get(kind, 0.0)] * 2 for kind in KINDS}
    return side


def test_what_is_judged_is_of_rounds_and_counts_fused_sums() -> None:
    sides = [seconds(DEEPSPEED, 3.3, 0.2, 0.3), seconds(BASELINE, 4.5, 0.4, 0.3), seconds(DTD, 4.0, 0.2, 0.3)]
    sides += [seconds(CAC, 3.6, 0.1, 0.2), seconds(FUSED, 3.2, 0.1, 0.1, 0.05)]
    sides += [seconds(OVERLAP, 3.0, 0.2, 0.2)]
    found = [each["median"] for each in report.asked(sides)]
    assert found == pytest.approx([0.75, 1 / 3, 0.75, 0.5, 1.5, 1.1])
    alone = [seconds(name, 1.0, 0.0, 0.3) for name in SIDES]
    assert report.asked(alone)[0]["median"] is None


@pytest.mark.parametrize("loss", [1.01, float("nan")])
def test_sides_that_compute_something_else_are_not_reported(loss: float) -> None:
    with pytest.raises(ConfigError, match="b and a do not compute the same"):
        check_losses([Side("a", [1.0]), Side("b", [loss])], TOLERANCE)


def test_weak_scaling_has_the_batch_grow() -> None:
    words = ["--nodes", "1,2,4", "--scaling"]
    assert [run.batch for run in resolve(read(Options, [*words, "weak", "--batch", "32"]))] == [8, 16, 32]
    assert [run.batch for run in resolve(read(Options, [*words, "strong", "--batch", "32"]))] == [32, 32, 32]


def test_several_numbers_of_ranks_are_drawn_beside_each_other(tmp_path: Path) -> None:
    runs = resolve(read(Options, ["--nodes", "1,2"]))
    numbers = report.results([(run, [seconds(name, 1.0, 0.1, 0.2) for name in SIDES]) for run in runs])
    assert tmp_path / "run" / report.SCALING in publish(
        tmp_path / "run", numbers, report.text(numbers), report.pictures(numbers)
    )
    assert (tmp_path / "run" / report.SCALING).stat().st_size > 1000
    assert "step ms by ranks" in report.text(numbers)


def test_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ted", "--dry-run", "--nodes", "1,4", "--runs", str(tmp_path)]) == 0
    assert "8 ranks: 4 x 2" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "0"], "nodes = 0 is not an integer from 1 to 64"),
        (["--nodes", "two"], "--nodes two is not a number"),
        (["--bandwidth", "3"], "bandwidth = '3' is not a bandwidth"),
        (["--rounds", "0"], "--rounds 0 is not at least 1"),
        (["--tensor", "3"], "--tensor 3 does not divide the 8 ranks"),
        (["--hidden", "30"], "--hidden 30 does not divide into --heads 8"),
        (["--heads", "1"], "--heads 1 do not divide by --tensor 2"),
        (["--layers", "1"], "--every 2 leaves no block of --layers 1 experts"),
        (["--batch", "6"], "--batch 6 does not divide by the 4 ranks"),
        (["--experts", "6"], "--experts 6 does not divide by the 4 ranks"),
        (["--k", "9"], "--k 9 is more than --experts 8"),
        (["--context", "5", "--batch", "32"], "--experts 8 have 5 slots each"),
        (["--nodes", "1,3", "--scaling", "weak", "--ranks-per-node", "2"], "has no share for 1 of 3 nodes"),
    ],
)
def test_mistakes_are_one_sentence(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ted", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("axonn: error: ") and words in error and error.count("\n") == 1


def test_tiles_take_what_is_stated(capfd: pytest.CaptureFixture[str]) -> None:
    """The tiled step's temporary memory is below what is printed first, the whole one's is not; under ZeRO-1 gloo copies the gathered weights."""
    assert tiled.main(["--elements", "1600000", "--tile-size", "20000", "--steps", "1"]) == 0
    said = capfd.readouterr().out
    limit = float(re.search(r"1 MiB = ([\d.]+) MiB", said)[1])
    peaks = {
        name.strip(): float(peak) for name, peak in re.findall(r"^(.*?) +[\d.]+ ms a step +([\d.]+) MiB", said, re.M)
    }
    assert peaks.keys() == {f"{kind}, {size}" for kind in ("torch", "ZeRO-1") for size in ("whole", "tiled")}
    assert {name for name, peak in peaks.items() if peak <= limit} == {"torch, tiled"}
    assert peaks["ZeRO-1, tiled"] < peaks["ZeRO-1, whole"] / 2
    assert said.count("speed, tiled") == 2
