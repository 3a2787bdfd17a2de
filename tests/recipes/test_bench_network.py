"""The benchmark that writes a machine file: what it measures is there, and the planner reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonn_plugins.cli import main
from axonn_plugins.cluster.launch import launch
from axonn_plugins.config import ConfigError
from axonn_plugins.planner import machine
from axonn_recipes.bench_network import measure as measuring
from axonn_recipes.bench_network.measure import Measured, pairs
from axonn_recipes.bench_network.recipe import main as bench
from axonn_recipes.bench_network.report import described, toml


def test_pairs_of_groups_in_a_node() -> None:
    assert pairs(4) == [(1, 2), (1, 4), (2, 2)]
    assert pairs(6) == [(1, 2), (1, 3), (1, 6), (2, 3), (3, 2)]
    assert pairs(1) == []


def test_a_file_that_the_planner_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AXONN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "_LAYERS", 2)
    words = ["--layouts", "1x4", "--size", "64K", "--matrix", "64", "--rounds", "1", "--runs", str(tmp_path)]
    assert main(["bench", "network", *words]) == 0
    file = tmp_path / "bench_network" / "machine.toml"
    assert f"axonn plan --machine {file}" in capsys.readouterr().out
    assert machine.measured_file().read_text() == file.read_text()
    loaded = machine.load(str(file))
    assert loaded.domain == 4 and loaded.interfaces == 0.25 and loaded.bandwidth_efficiency == 1
    assert set(loaded.within) == {(1, 2), (1, 4), (2, 2)} and all(rate > 0 for rate in loaded.within.values())
    assert "one node" in loaded.assumed and loaded.slow_bandwidth == loaded.fast_bandwidth
    asked = f"plan --model layers=4,hidden=512,heads=8,sequence=256 --machine {file} --gpus 4 --batch 8"
    assert main(asked.split()) == 0
    assert "best: " in capsys.readouterr().out


def test_two_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Ranks 0 and 1 are taken for a node, 2 and 3 for another.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(measuring, "_LAYERS", 2)
    found = launch(_as_two_nodes, 4)
    assert found[0] == found[3] or found[0].between == found[3].between
    assert (found[0].nodes, found[0].ranks, set(found[0].within)) == (2, 2, {(1, 2)})
    path = tmp_path / "two.toml"
    path.write_text(toml(found[0], "4K", "here"))
    loaded = machine.load(str(path))
    assert loaded.slow_bandwidth == pytest.approx(found[0].between, rel=1e-4)
    assert loaded.reduce_scatter == pytest.approx(found[0].reduce_scatter, rel=1e-2)
    assert loaded.assumed == ""
    assert "between nodes" in described(found[0])


def _as_two_nodes() -> Measured:
    import os

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return measuring.measure(4096, 32, 1)


def test_wrong_input(tmp_path: Path) -> None:
    for words, message in (
        (["--size", "64"], '--size = "64" is not a size'),
        (["--rounds", "0"], "--rounds = 0 is too small"),
        (["--matrix", "1"], "--matrix = 1 is too small"),
        (["--layouts", "2x2,4x2"], "names 2 clusters"),
        (["--layouts", "4"], "is not nodes x ranks a node"),
    ):
        with pytest.raises(ConfigError, match=message):
            bench([*words, "--runs", str(tmp_path)])
    assert main(["bench", "network", "--dry-run", "--runs", str(tmp_path)]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bf16", [True, False])
def test_a_gpu_without_bf16_is_said_to_have_none(bf16: bool, tmp_path: Path) -> None:
    found = Measured(
        device="V100",
        nodes=1,
        ranks=4,
        bf16=bf16,
        tensor=9e13,
        vector=2e13,
        overhead=1e-5,
        memory=16e9,
        memory_bandwidth=8e11,
        within={(1, 4): 1e11},
        within_latency=1e-5,
        between=None,
        between_latency=None,
        reduce_scatter=None,
        call=None,
    )
    file = tmp_path / "machine.toml"
    file.write_text(toml(found, "16 MiB", "a node"))
    read = machine.load(str(file))
    assert read.bf16 is bf16 and read.device == "cuda"
