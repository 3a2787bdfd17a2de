"""The benchmark of PCCL: what is asked for is what runs, and what is reported is what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from axonn_plugins.cli import main
from axonn_plugins.cli.options import read
from axonn_plugins.config import ConfigError
from axonn_recipes.bench.output import publish
from axonn_recipes.bench_pccl.report import bound, pictures, results, speedups, text
from axonn_recipes.bench_pccl.settings import Options, resolve

SECONDS = {"pccl": 0.3, "gloo": 0.6, "ring": 0.15, "hierarchical_log_direct": 0.3, "hierarchical_ring_direct": 0.2}


def stored() -> dict[str, Any]:
    words = ["--layouts", "4x2,1x4", "--sizes", "64K,16M", "--collectives", "all_gather,all_reduce"]
    settings = resolve(read(Options, words))
    cells = [
        {
            **{"nodes": nodes, "ranks_per_node": ranks, "collective": collective, "bytes": size, "side": side},
            **{"choice": "ring/2" if side == "pccl" else None, "seconds": [seconds, 2 * seconds, seconds]},
        }
        for nodes, ranks in settings.layouts
        for collective in settings.collectives
        for size in settings.sizes
        for side, seconds in SECONDS.items()
    ]
    return results(settings, cells, {"mpi": "mpi4py is not installed"})


def test_table_of_a_stored_result(tmp_path: Path) -> None:
    numbers = stored()
    said = text(numbers)
    rows = [line.split() for line in said.splitlines()]
    row = next(row for row in rows if row[:3] == ["all_gather", "4x2", "16M"])
    assert row[3:8] == ["300", "300-450", "600", "2.00", "0.50"]  # twice gloo's speed, half the flat ring's
    assert row[-1] == "ring/2"
    assert "mpi left out: mpi4py is not installed" in said
    files = publish(tmp_path / "run", numbers, said, pictures(numbers))
    assert [file.name for file in files] == ["results.json", "table.txt", "speedup.png", "halving.png"]
    assert text(json.loads(files[0].read_text())) == said
    assert files[2].read_bytes()[:4] == b"\x89PNG"


def test_speedups_are_by_size_and_ranks() -> None:
    found = speedups(stored(), "all_reduce", "pccl", "gloo")
    assert found == {(size, place): 2.0 for size in (2**16, 2**24) for place in ((4, 2), (1, 4))}
    assert speedups(stored(), "all_reduce", "pccl", "mpi") == {}


def test_bound_is_latency_and_the_bytes_of_a_node() -> None:
    assert bound("all_gather", 16_000_000, 4, 5e-4, 62.5e6) == pytest.approx(0.001 + 0.192)
    assert bound("reduce_scatter", 16_000_000, 5, 5e-4, 62.5e6) == pytest.approx(0.0015 + 0.2048)
    assert bound("all_reduce", 16_000_000, 4, 5e-4, 62.5e6) == pytest.approx(0.386)
    assert bound("all_gather", 16_000_000, 1, 5e-4, 62.5e6) is None


def test_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pccl", "--dry-run", "--layouts", "8x4", "--sizes", "64K,16M", "--runs", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "nodes x ranks: 8x4, emulated, latency 500us, bandwidth 500Mbit a node" in text
    assert "all_gather, reduce_scatter, all_reduce of 64K, 16M in all" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layouts", "4"], "--layouts 4 is not nodes x ranks a node"),
        (["--layouts", "1x1"], "--layouts 1x1 is not nodes x ranks a node, of at least 2 ranks"),
        (["--sizes", "64G"], "--sizes 64G is not a size"),
        (["--collectives", "gather"], "--collectives gather is not measured"),
        (["--algorithms", "best"], "--algorithms best is not known"),
        (["--algorithms", "ring/x"], "chunks that are no positive integer"),
        (["--rounds", "0"], "--rounds 0 is not at least 1"),
        (["--latency", "3"], "latency = '3' is not a time"),
    ],
)
def test_mistakes_are_named(options: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(read(Options, options))


def test_all_sides_run_in_one_node(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--layouts", "1x3", "--sizes", "6K,200K", "--rounds", "2", "--algorithms", "ring,recursive,bruck/2"]
    assert main(["bench", "pccl", *words, "--runs", str(tmp_path)]) == 0
    numbers = json.loads((tmp_path / "bench_pccl" / "results.json").read_text())
    sides = {cell["side"] for cell in numbers["cells"]}
    assert sides - {"mpi"} == {"pccl", "gloo", "ring", "bruck/2"}  # recursive needs a power of two
    assert all(len(cell["seconds"]) == 2 and cell["low"] <= cell["median"] <= cell["high"] for cell in numbers["cells"])
    # A rank brings the whole of what is summed: 200K are too many for a desk.
    took = {(cell["collective"], cell["bytes"]): cell["choice"] for cell in numbers["cells"] if cell["side"] == "pccl"}
    assert {kind for kind, choice in took.items() if choice != "desks"} == {
        ("reduce_scatter", 200 * 1024),
        ("all_reduce", 200 * 1024),
    }
    assert "all_gather" in capfd.readouterr().out
