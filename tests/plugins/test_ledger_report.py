"""The ledger of a run, and the table and picture made of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from axonn_plugins.cli import main
from axonn_plugins.observe.ledger import Ledger
from axonn_plugins.observe.ledger_report import read_ledger, write_ledger
from axonn_plugins.observe.trace import Tracer
from axonn_tp import Mesh
from axonn_tp.comm.collectives import start_all_gather
from tests.distributed import run_ranks


def hidden_and_waited_for(folder: Path) -> None:
    mesh = Mesh.create(1, 1, 2)
    with Ledger(mesh.axis_names()) as ledger:
        under_way = start_all_gather(torch.ones(6), mesh, "z")
        time.sleep(0.05)
        under_way.wait()
        dist.all_reduce(torch.ones(4), group=mesh.group("z"))
    if dist.get_rank() == 0:
        write_ledger(ledger.entries, 7, folder)
    torchs_own_calls()


def torchs_own_calls() -> None:
    """Lists and coalesced calls; what torch waits for where it is used."""
    world: Any = dist.group.WORLD
    one, parts = torch.ones(6), [torch.ones(3), torch.ones(3)]
    with Ledger() as ledger:
        used = functional.all_reduce(one, "sum", world)
        time.sleep(0.05)
        assert (used + 1).tolist() == [3.0] * 6
        functional.wait_tensor(functional.broadcast(one, 0, world))
        made = functional.all_reduce_coalesced([one, parts[0]], "sum", world)
        made += functional.all_gather_into_tensor_coalesced(parts, world)
        made += functional.reduce_scatter_tensor_coalesced([one], "sum", [0], world)
        assert [each.sum().item() for each in made] == [12, 6, 6, 6, 6]
        dist.reduce_scatter(torch.empty(3), parts)
        dist.all_to_all(parts, [part.clone() for part in parts])
    found = [(entry.collective.op, entry.collective.elements) for entry in ledger.entries]
    reduced, gathered, scattered = ("all_reduce", 6), ("all_gather", 3), ("reduce_scatter", 6)
    assert found[:4] == [reduced, ("broadcast", 6), reduced, ("all_reduce", 3)], found
    assert found[4:] == [gathered, gathered, scattered, scattered, ("all_to_all", 6)], found
    assert not ledger.unknown
    first = ledger.entries[0]
    assert first.ended - first.started >= 0.05 and first.exposed is not None  # its wait was seen


def test_a_run_keeps_one_step(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run_ranks(hidden_and_waited_for, 2, tmp_path)
    gather, reduce = read_ledger(tmp_path)["collectives"]
    assert (gather["op"], gather["axis"], gather["ranks"], gather["bytes"]) == ("all_gather", "z", 2, 24.0)
    assert gather["ended"] - gather["started"] >= 0.05 and 0 <= gather["exposed"] <= gather["ended"] - gather["started"]
    assert (reduce["op"], reduce["bytes"], reduce["exposed"]) == ("all_reduce", 16.0, None)
    assert main(["ledger", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "step 7, rank 0" in printed and "all_gather" in printed
    assert (tmp_path / "ledger.png").stat().st_size > 1000


def traced(folder: Path) -> None:
    mesh = Mesh.create(1, 1, 2)
    tracer = Tracer(2, 3, folder, mesh.axis_names())
    for step in range(1, 6):
        with tracer.part_of(step):
            start_all_gather(torch.ones(6), mesh, "z").wait()
        with tracer.part_of(step):
            dist.all_reduce(torch.ones(4), group=mesh.group("z"))
        tracer.done(step)
    other = Tracer(9, 9, folder / "unused", mesh.axis_names())
    other.close()


def test_a_chrome_trace_names_axes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run_ranks(hidden_and_waited_for, 2, tmp_path)
    run_ranks(traced, 2, tmp_path)
    events = json.loads((tmp_path / "trace-rank0.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events if event.get("cat") == "user_annotation"]
    assert [names.count(name) for name in ("all_gather z", "wait all_gather z", "all_reduce z")] == [2, 2, 2]
    assert not (tmp_path / "unused").exists()
    assert main(["ledger", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "trace-rank0.json; open it in" in printed and "trace-rank1.json" in printed


def test_a_folder_without_one(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["ledger", str(tmp_path)]) == 2
    assert "holds no ledger.json" in capsys.readouterr().err
