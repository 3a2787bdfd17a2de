"""The benchmark of all systems at once: every host computes the same, and what is reported is what was measured."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from axonn_plugins.cli import main
from axonn_plugins.cli.options import read
from axonn_recipes.bench_all.report import results, text
from axonn_recipes.bench_all.settings import Options, resolve
from axonn_recipes.bench_moe.launches import unbuilt
from axonn_recipes.bench_tp.measure import Side

TINY = ["--layers", "2", "--hidden", "16", "--heads", "2", "--context", "8", "--batch", "8", "--experts", "4"]
TINY += ["--width", "16", "--local", "--nodes", "2", "--rounds", "1", "--steps", "1"]


@pytest.mark.usefixtures("by_pccl")
def test_sides_run_and_are_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruned on a pipeline with all else on, beside both hosts."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    megatron = "1,4,1" if importlib.util.find_spec("megatron") else ""
    words = ["--deepspeed", "2,2,2", "--megatron", megatron, "--ours", "2,1,2,2,1,1", "--runs", str(tmp_path)]
    assert main(["bench", "all", *TINY, *words]) == 0
    (out, err), folder = capfd.readouterr(), tmp_path / "bench_all"
    numbers = json.loads((folder / "results.json").read_text())
    names = ["DeepSpeed: 2 stages, experts over 2, 2 microbatches"]
    names += ["Megatron: no pipeline, experts over 4, 1 microbatches"] if megatron else []
    sides = {side["name"]: side for side in numbers["sides"]}
    assert list(sides) == [*names, "ours: x2 y1 z1, 2 stages, experts over 1, 2 microbatches"]
    for name, side in sides.items():
        assert name in out and side["losses"] == pytest.approx(sides[names[0]]["losses"], rel=1e-6)
        assert side["losses"][2] < side["losses"][0] and len(side["seconds"]) == 1 and side["memory_bytes"] > 0
    assert [pair["peer"] for pair in numbers["best"]] == names and "SAMO: pruned" in err


def test_the_fastest_of_each_host_is_compared() -> None:
    settings = resolve(
        read(Options, ["--deepspeed", "1,8,1 2,4,4", "--megatron", "", "--ours", "2,2,4,2,1,1 2,1,4,2,1,2"])
    )
    sides = [
        Side(str(way), "peer", unbuilt, [1.0], 1, [seconds, 2 * seconds])
        for way, seconds in zip(settings.ways, (4.0, 3.0, 2.5, 2.0), strict=True)
    ]
    numbers = results(settings, sides)
    (pair,) = numbers["best"]
    assert (pair["host"], pair["peer"], pair["ours"], pair["median"]) == (
        "DeepSpeed",
        sides[1].name,
        sides[3].name,
        1.5,
    )
    assert f"{sides[1].name} / {sides[3].name}: 1.50" in text(numbers)


def test_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "all", "--dry-run", "--sparsity", "0", "--runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "; dense;" in out and "DeepSpeed: no pipeline, experts over 8" in out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "0"], "nodes = 0 is not an integer from 1 to 64"),
        (["--bandwidth", "3"], "bandwidth = '3' is not a bandwidth"),
        (["--k", "9"], "--k 9 is more than --experts 8"),
        (["--sparsity", "1"], "--sparsity 1.0 is not a share from 0 to below 1"),
        (["--stage", "2"], "--stage 2 is not 0 or 1"),
        (["--deepspeed", "1,8"], "--deepspeed 1,8 is not 3 positive integers"),
        (["--ours", "2,2,4"], "--ours 2,2,4 is not 6 positive integers"),
        (["--ours", ""], "--ours names no side"),
        (
            ["--deepspeed", "3,1,1"],
            "DeepSpeed: 3 stages, experts over 1, 1 microbatches: 3 does not divide the 8 ranks",
        ),
        (["--deepspeed", "8,1,1"], "--layers 2 do not divide by its stages"),
        (["--ours", "1,1,1,1,8,1", "--hidden", "12", "--heads", "4"], "gy = 8 does not divide --hidden 12"),
        (["--ours", "2,4,4,2,1,1"], "4 ranks divide not both the 2 of a stage"),
        (["--batch", "12"], "--batch 12 does not divide by 8 readers and 1 microbatches"),
    ],
)
def test_mistakes_are_one_sentence(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "all", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("axonn: error: ") and words in error and error.count("\n") == 1
