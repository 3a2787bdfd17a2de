"""`--backend` of the benchmarks: one wire for all sides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from axonn_plugins.cli import main
from axonn_plugins.cluster.launch import launch
from axonn_recipes.bench_tp import measure
from axonn_recipes.bench_tp.settings import Settings, Where, run_on


@pytest.mark.parametrize("name", ["tp", "ted", "moe", "context", "pipeline", "samo_cluster", "megatron"])
def test_every_benchmark_of_training_takes_it(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for backend in ("pccl", "gloo"):
        command = ["bench", name, "--dry-run", "--backend", backend, "--runs", str(tmp_path)]
        assert main(command) == 0
        assert f"{backend}, " in capsys.readouterr().out


def test_others_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tp", "--dry-run", "--backend", "mpi", "--runs", str(tmp_path)]) != 0
    assert "gloo" in capsys.readouterr().err


def _measured(settings: Settings) -> tuple[str, list[str]]:
    sides = measure.measure(settings)
    return dist.get_backend(), [side.name for side in sides]


def test_all_sides_of_a_run_are_on_it() -> None:
    where = Where(layers=1, hidden=32, context=8, batch=4, rounds=1, backend="pccl")
    for backend, sides in launch(_measured, 2, run_on(where, "1,1,2", "ddp,fsdp2")):
        assert backend == "pccl"
        assert {"ddp", "fsdp2", "x1 y1 z2 d1"} <= set(sides)
