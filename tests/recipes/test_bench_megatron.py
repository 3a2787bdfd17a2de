"""The benchmark of Megatron's layers and ours: the fastest of each are compared, and bytes are those of the grids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from axonn_plugins.cli import main
from axonn_plugins.cli.options import read
from axonn_plugins.cluster import lacking
from axonn_plugins.config import ConfigError
from axonn_recipes.bench_megatron import report, settings
from axonn_recipes.bench_megatron.measure import Run
from axonn_recipes.bench_megatron.recipe import compare
from axonn_recipes.megatron_gpt.settings import Settings as Training

SMALL = [
    "--precision",
    "fp32",
    "--layers",
    "1",
    "--hidden",
    "32",
    "--heads",
    "4",
    "--context",
    "8",
    "--batch",
    "4",
    "--rounds",
    "1",
    "--steps",
    "1",
]


@pytest.mark.skipif(lacking() is not None, reason=f"no cluster can be emulated here: {lacking()}")
def test_sides_are_measured_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "VARIANTS", {"": {}})
    words = [
        "--nodes",
        "2",
        "--ranks-per-node",
        "1",
        "--grids",
        "1,1,2",
        "--bandwidth",
        "1Gbit",
        "--runs",
        str(tmp_path),
    ]
    assert main(["bench", "megatron", *SMALL, *words]) == 0
    (numbers,) = json.loads((tmp_path / "bench_megatron" / "results.json").read_text())
    assert numbers["best"]["AxoNN"] == "x1 y1 z2 d1"
    assert set(numbers["tried"]["Megatron"]) == {"tensor 1 data 2", "tensor 2 data 1"}
    weights = 12 * 32 * 32
    for side in numbers["sides"]:
        assert side["between"] > 0 and len(side["seconds"]) == 1
        if side["system"] == "AxoNN":
            # A half is gathered in the forward pass, and one scattered in the backward pass: fp32, two ranks.
            assert side["sent"]["z"] >= 2 * weights / 2 * 4
        elif side["name"] == "tensor 1 data 2":
            assert side["sent"]["data"] >= 2 * weights / 2 * 4
    assert (tmp_path / "bench_megatron" / "figure_11.png").stat().st_size > 10_000


def test_the_fastest_of_each_are_compared() -> None:
    (point,) = settings.resolve(read(settings.Options, ["--rounds", "3", "--precision", "bf16"]))

    def run(side: Training) -> list[Run]:
        seconds = 2.0 + side.tensor / 8 - 0.5 * side.overlap_grad_reduce
        if side.grid is not None:
            seconds = 1.0 + abs(side.grid.gx - 2) + abs(side.grid.gz - 4) + 0.1 * side.overlap_grad_reduce
        return [Run([5.0, 4.0], [seconds], 1.0, {"z": 8.0})] * point.ranks

    sides, tried = compare(point, run)
    assert [(side.system, side.name) for side in sides] == [
        ("Megatron", "tensor 1 data 8"),
        ("Megatron", "tensor 1 data 8, overlapped"),
        ("AxoNN", "x2 y1 z4 d1"),
    ]
    numbers = report.results(point, sides, tried)
    assert numbers["ratio"]["range"] == pytest.approx([1.625, 1.625])
    assert "Megatron / AxoNN, each at its best: 1.62" in report.point_text(numbers)
    assert len(tried["AxoNN"]) == len(point.ours()) + 2 * (len(settings.VARIANTS) - 1)


def test_sides_that_learn_otherwise_are_refused() -> None:
    (point,) = settings.resolve(read(settings.Options, ["--precision", "fp32", "--grids", "2,1,4"]))
    losses = {True: [5.0], False: [5.1]}
    with pytest.raises(ConfigError, match="do not compute the same"):
        compare(point, lambda side: [Run(losses[side.grid is None], [1.0])] * point.ranks)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "two"], "--nodes two is not a list of integers"),
        (["--nodes", "1,2,4", "--hidden", "64,128"], "--hidden 64,128 has 2 sizes for 3 numbers of nodes"),
        (["--nodes", "1", "--ranks-per-node", "1"], "nothing to communicate"),
        (["--grids", "2,2"], "--grids 2,2 is not gx,gy,gz"),
        (["--grids", "3,1,1"], "no way to split 8 ranks"),
        (["--nodes", "1", "--ranks-per-node", "1000000000"], "no way to split 1000000000 ranks"),
        (["--heads", "7"], "--hidden 512 does not divide into --heads 7"),
        (["--bandwidth", "3"], "is not a bandwidth"),
    ],
)
def test_mistakes_are_one_sentence(options: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        settings.resolve(read(settings.Options, options))
    assert "\n" not in str(error.value)
