"""The benchmark: every side runs and learns the same, and what is reported is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from axonn_plugins.cli import main
from axonn_plugins.config import ConfigError
from axonn_recipes.bench.rounds import check_losses
from axonn_recipes.bench_tp.measure import TOLERANCE, Side
from axonn_recipes.bench_tp.memory import PeakMemory
from axonn_recipes.bench_tp.report import comparisons
from axonn_recipes.bench_tp.settings import PEERS, STAGES, options_of, stage_of, ways
from axonn_tp import Grid

TINY = ["--layers", "1", "--hidden", "32", "--heads", "4", "--context", "8", "--batch", "4", "--rounds", "1"]


def test_every_side_runs_and_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert main(["bench", "tp", *TINY, "--grids", "2,1,1 1,1,2 1,1,1", "--runs", str(tmp_path)]) == 0
    text = capfd.readouterr().out
    folder = tmp_path / "bench_tp"
    assert {file.name for file in folder.iterdir()} == {"results.json", "table.txt", "steps.png"}
    numbers = json.loads((folder / "results.json").read_text())
    sides = {side["name"]: side for side in numbers["sides"]}
    ours = ["x2 y1 z1 d1", "x1 y1 z2 d1", "x1 y1 z2 d1, reshard half", "x1 y1 z2 d1, reshard"]
    ours += ["x1 y1 z1 d2", "x1 y1 z1 d2, ZeRO-1", "x1 y1 z1 d2, ZeRO-2"]
    assert list(sides) == [*PEERS, *ours, *(f"x2 y1 z1 d1, {stage}" for stage, _ in STAGES)]
    for name, side in sides.items():
        assert name in text
        assert side["losses"] == pytest.approx(sides["ddp"]["losses"], abs=1e-3)
        assert side["losses"][2] < side["losses"][0]
        assert len(side["seconds"]) == 1 and side["min"] <= side["median"] <= side["max"]
        assert side["memory_bytes"] > 0
        assert (side["compute_s"] is None) == (side["exposed_communication_s"] is None) == (name == "zero3")
        # What else the machine sends meanwhile is counted, too.
        assert side["bytes_inside_nodes"] > 0 and side["bytes_between_nodes"] < 0.01 * side["bytes_inside_nodes"]
    assert sides["x1 y1 z2 d1"]["memory_bytes"] < sides["ddp"]["memory_bytes"]
    assert [pair["peer"] for pair in numbers["comparisons"]] == list(PEERS)


@pytest.mark.thorough
def test_a_unet_beside_zero_3(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    words = [*TINY, "--model", "unet", "--hidden", "16", "--grids", "1,1,2", "--peers", "ddp,zero3", "--timeline"]
    assert main(["bench", "tp", *words, "--runs", str(tmp_path)]) == 0
    text = capfd.readouterr().out
    assert "U-Net: 16 channels x (1, 2, 2), 1 blocks a level, 4 heads, 4 images of 8 x 8 a step" in text
    numbers = json.loads((tmp_path / "bench_tp" / "results.json").read_text())
    sides = {side["name"]: side for side in numbers["sides"]}
    assert {"ddp", "zero3", "x1 y1 z2 d1"} < set(sides) and len(sides) == 8
    for side in sides.values():
        assert side["losses"] == pytest.approx(sides["ddp"]["losses"], abs=1e-4)
        assert side["losses"][2] < side["losses"][0]
        assert side["images_per_s"] == pytest.approx(4 / side["median"])
    assert [pair["peer"] for pair in numbers["comparisons"]] == ["ddp", "zero3"]
    kept = {file.stem for file in (tmp_path / "bench_tp").glob("timeline-*.json")}
    assert len(kept) == len(sides) and {"timeline-zero3", "timeline-x1-y1-z2-d1-reshard"} < kept
    for name in kept:
        for row in json.loads((tmp_path / "bench_tp" / f"{name}.json").read_text())["ranks"]:
            assert sum(row["parts_ms"].values()) == pytest.approx(row["step_ms"], rel=1e-9)


def test_a_grid_trains_in_each_way_to_keep_weights_and_states() -> None:
    assert ways(Grid(2, 1, 1, 1)) == [""]
    assert ways(Grid(2, 1, 2, 1)) == ["", "reshard half", "reshard", "inputs again"]
    assert options_of("inputs again") == {"regather_inputs": True}
    assert len(ways(Grid(1, 1, 2, 2))) == 9 and ways(Grid(1, 1, 2, 2))[-1] == "reshard, ZeRO-2"
    assert options_of("reshard, ZeRO-2") == {"reshard_after_forward": True} and stage_of("reshard, ZeRO-2") == 2
    assert options_of("ZeRO-1") == options_of("+OAG") == {} and stage_of("reshard half") == stage_of("+ORS") == 0
    assert options_of("reshard half") == {"reshard_after_forward": 0.5} and not options_of("+OAR")["overlap_all_gather"]


def test_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dry-run", "--nodes", "4", "--bandwidth", "500Mbit", "--runs", str(tmp_path), "--batch", "16"]
    assert main(["bench", "tp", *words]) == 0
    text = capsys.readouterr().out
    assert "8 ranks: 4 nodes of 2, gloo, emulated, latency 0us, bandwidth 500Mbit a node" in text
    assert "x2 y1 z4 d1" in text and "DeepSpeed ZeRO-3" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "0"], "--nodes 0 is not at least 1"),
        (["--nodes", "1000000000"], "nodes = 1000000000 is not an integer from 1 to 64"),
        (["--ranks-per-node", "1000000000"], "--batch 16 does not divide by the 1000000000 ranks of ddp"),
        (["--latency", "3"], "latency = '3' is not a time"),
        (["--bandwidth", "3"], "bandwidth = '3' is not a bandwidth"),
        (["--hidden", "30"], "--hidden 30 does not divide into --heads 8"),
        (["--peers", "ddp,fsdp3"], "--peers fsdp3 is not known; choose from ddp"),
        (["--model", "unet", "--peers", "tp"], "--peers tp splits a GPT's layers, not a U-Net's; choose from ddp"),
        (
            ["--model", "unet", "--ranks-per-node", "3", "--grids", "1,3,1"],
            "--grids 1,3,1: --hidden 256 does not divide",
        ),
        (["--grids", "2,1"], "--grids 2,1: it is not three integers; write gx,gy,gz"),
        (["--grids", "3,1,1"], "--grids 3,1,1: gx*gy*gz = 3*1*1 = 3 does not divide the 2 ranks"),
        (["--grids", "1,1,2", "--batch", "3"], "--grids 1,1,2: --batch 3 does not divide by gz*gdata = 2"),
        (["--grids", "2,1,1", "--batch", "3"], "--batch 3 does not divide by the 2 ranks of ddp"),
        (["--heads", "1", "--peers", "tp"], "--heads 1 do not divide by the 2 tensor-parallel ranks of tp"),
    ],
)
def test_mistakes_are_one_sentence(options: list, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tp", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("axonn: error: ") and words in error and error.count("\n") == 1


def side(name: str, kind: str, memory: int, seconds: list[float], loss: float = 1.0) -> Side:
    return Side(name, kind, lambda: lambda: torch.zeros(()), [loss], memory, seconds)


def test_a_peer_is_compared_with_our_fastest_grid_of_at_most_its_memory() -> None:
    measured = [
        *(side("lean", "peer", 10, [4.0, 6.0]), side("fat", "peer", 30, [3.0, 3.0]), side("tiny", "peer", 1, [1.0])),
        *(side("slow", "ours", 10, [2.0, 2.0]), side("fast", "ours", 20, [1.0, 1.0])),
    ]
    lean, fat, tiny = comparisons(measured)
    assert (lean["ours"], lean["ratio"], lean["low"], lean["high"]) == ("slow", 2.5, 2.25, 2.75)
    assert (fat["ours"], fat["ratio"]) == ("fast", 3.0)
    assert tiny["ours"] is None


@pytest.mark.parametrize("loss", [1.01, float("nan")])
def test_sides_that_compute_something_else_are_not_reported(loss: float) -> None:
    with pytest.raises(ConfigError, match="b and a do not compute the same"):
        check_losses([side("a", "peer", 1, [1.0]), side("b", "ours", 1, [1.0], loss)], TOLERANCE)


def test_peak_memory_is_exact() -> None:
    with PeakMemory() as memory:
        kept = torch.ones(1000)
        memory.restart()
        passing = kept * 2
        del passing
        view = kept[:10]
        assert (view + 1).numel() == 10
    assert memory.peak == 8000
    with memory:
        memory.restart()
        kept.untyped_storage().resize_(0)
        memory.restart()
    assert memory.peak == 0
