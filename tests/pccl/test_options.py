"""Switching pccl on and telling it what to do, and the error where it cannot be."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from axonn_plugins.cluster.launch import launch
from axonn_plugins.pccl import Options, register
from axonn_plugins.pccl.build import BuildError, load
from tests.deepspeed.scripts import environment, one_sentence


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Before ranks are forked, whose time is limited."""
    load()


IMPORTED = """
import sys, torch
light = ["axonn_plugins.pccl" + name for name in ("", ".coalescing", ".default_timeout", ".options", ".watched_barrier")]
heavy = [name for name in sys.modules if name.startswith("axonn_plugins.pccl") and name not in light]
print("pccl" in torch.distributed.Backend.backend_list, heavy, "pydantic" in sys.modules)
"""


@pytest.mark.parametrize(("switch", "registered"), [("1", True), ("0", False)])
def test_importing_torch_registers_and_loads_nothing_else(switch: str, registered: bool, tmp_path: Path) -> None:
    variables = environment(AXONN_PLUGINS=switch, AXONN_CACHE=str(tmp_path / "cache"))
    run = subprocess.run([sys.executable, "-c", IMPORTED], env=variables, capture_output=True, text=True, check=True)
    assert run.stdout.split(maxsplit=1) == [str(registered), "[] False\n"]
    assert not (tmp_path / "cache").exists()


def test_by_hand_before_torch(tmp_path: Path) -> None:
    code = "import axonn_plugins; axonn_plugins.activate(); import sys; assert 'torch' not in sys.modules" + IMPORTED
    variables = environment(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    run = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("True []")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "algorithm": ({"algorithm": "rings"}, 'use "ring", or another of auto, ring, recursive, hierarchical, native'),
    "ranks_per_node": ({"ranks_per_node": 0}, 'an integer of at least 1, or "auto"'),
    "bool": ({"ranks_per_node": True}, "an integer of at least 1"),
    "interfaces": ({"interfaces": []}, "a list of network interfaces"),
    "tuning_file": ({"tuning_file": 3}, "a path"),
    "tune": ({"tune": 1}, "true or false"),
    "silence": ({"silence": 0.5}, "a number of seconds from 1 to 86400"),
    "no silence": ({"silence": float("nan")}, "a number of seconds"),
    "read_memory": ({"read_memory": 1}, "true or false"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options(name: str) -> None:
    given, said = WRONG[name]
    with pytest.raises(ValueError, match=f"{next(iter(given))} = ") as caught:
        Options(**given)
    assert said in str(caught.value) and one_sentence(str(caught.value))


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AXONN_PCCL_TUNE")
    assert Options.from_environment() == Options() and Options().tunes()
    given = {"ALGORITHM": "ring", "RANKS_PER_NODE": "4", "INTERFACES": "a, b", "TUNING": "t", "TUNE": "0"}
    for name, value in (given | {"SILENCE": "7", "READ_MEMORY": "1"}).items():
        monkeypatch.setenv(f"AXONN_PCCL_{name}", value)
    assert Options.from_environment() == Options("ring", 4, ("a", "b"), "t", silence=7.0, read_memory=True)
    assert not Options.from_environment().tune and not Options().tunes() and Options(tune=True).tunes()
    monkeypatch.setenv("AXONN_PCCL_TUNE", "no")
    with pytest.raises(ValueError, match="tune = 'no' is not true or false .in the environment 1 or 0.; correct"):
        Options.from_environment()
    monkeypatch.delenv("AXONN_PCCL_TUNE")
    monkeypatch.setenv("AXONN_PCCL_SILENCE", "long")
    with pytest.raises(ValueError, match="silence = 'long' is not a number of seconds from 1 to 86400; correct"):
        Options.from_environment()
    monkeypatch.delenv("AXONN_PCCL_SILENCE")
    monkeypatch.setenv("AXONN_PCCL_INTERFACE", "a")
    with pytest.raises(ValueError, match="AXONN_PCCL_INTERFACE is not .* use AXONN_PCCL_INTERFACES"):
        Options.from_environment()


def _algorithms() -> list[Any]:
    """A group of each kind of options; the nodes that each sees, and who does its work."""
    from axonn_plugins.pccl.backend import planner
    from axonn_plugins.pccl.default_timeout import timeout_of

    register()
    dist.init_process_group("pccl", pg_options=Options("recursive", 2), timeout=timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = {
        "world": dist.group.WORLD,
        "inherited": dist.new_group([0, 2, 4]),
        "mesh": init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b")).get_group("b"),
        "native": dist.new_group(backend="pccl", pg_options=Options("native")),
        "ring": dist.new_group(backend="cpu:pccl", pg_options=Options("ring", interfaces=("lo",))),
        "hierarchical": dist.new_group(
            backend="pccl", pg_options=Options("hierarchical", 3), timeout=timedelta(minutes=30)
        ),
    }
    nodes, timeouts = {}, {}
    for name, group in groups.items():
        if not isinstance(group, dist.ProcessGroup):
            continue
        timeouts[name] = timeout_of(group._get_backend(torch.device("cpu")))
        backend, ours = group._get_backend(torch.device("cpu")).name(), dist.get_world_size(group)
        nodes[name] = planner(group).nodes if backend == "pccl" else backend
        for elements in (ours, ours * 40_000):
            whole = torch.arange(elements, dtype=torch.float64)
            dist.all_reduce(whole, group=group)
            assert torch.equal(whole, ours * torch.arange(elements, dtype=torch.float64)), name
            part = torch.empty(elements // ours, dtype=torch.float64)
            dist.reduce_scatter_tensor(part, whole, group=group)
            dist.all_gather_into_tensor(whole, part, group=group)
            assert torch.equal(whole, ours**2 * torch.arange(elements, dtype=torch.float64)), name
            root = torch.full((elements,), float(rank))
            dist.broadcast(root, group=group, group_src=1)
            assert root.unique().tolist() == [dist.get_global_rank(group, 1)]
        dist.barrier(group)
    assert timeouts == {name: timedelta(seconds=1800 if name == "hierarchical" else 120) for name in timeouts}
    c10d._set_pg_timeout(timedelta(seconds=50), groups["mesh"])
    assert timeout_of(groups["mesh"]._get_backend(torch.device("cpu"))) == timedelta(seconds=50)
    return [nodes]


def test_every_algorithm_and_whose_options_hold() -> None:
    pairs, halves = ((0, 1), (2, 3), (4,)), ((0, 1, 2), (3, 4))
    for rank, (nodes,) in enumerate(launch(_algorithms, 5)):
        assert nodes.pop("inherited", ((0,), (1,), (2,))) == ((0,), (1,), (2,)), rank
        assert nodes.pop("ring") == ((0, 1, 2, 3, 4),)
        assert nodes == {"world": pairs, "mesh": pairs, "native": "gloo", "hierarchical": halves}


def _fails(how: str, folder: str) -> str:
    """Error that a rank is told when rank 1, or all, cannot make the group."""
    import os

    from axonn_plugins.pccl import build

    rank = int(os.environ["RANK"])
    options: Any = None
    if how == "compiler" and rank == 1:
        build.load.cache_clear()
        os.environ.update(AXONN_CACHE=folder, PATH=folder)
        os.environ.pop("CXX", None)
    if how in ("command", "damaged") and rank == 1:
        build.load.cache_clear()
        os.environ.update(AXONN_CACHE=folder, CXX="nowhere/c++ -pipe")
        if how == "damaged":
            build.place().parent.mkdir(parents=True)
            build.place().write_text("of another machine")
    if how == "interface" and rank == 1:
        options = Options(interfaces=("none0",))
    if how == "agreement":
        options = Options("ring" if rank == 1 else "recursive")
    register()
    try:
        dist.init_process_group("pccl", pg_options=options, timeout=timedelta(seconds=20))
    except (BuildError, ValueError) as error:
        return str(error)
    return "no error"


SAID = {
    "compiler": "no C++ compiler was found",
    "command": "nowhere/c++ cannot be run: No such file or directory; name a C++ compiler in CXX",
    "damaged": "does not load on this node",
    "interface": "interface 'none0' is not one",
    "agreement": "rank 1 of the group",
}


@pytest.mark.parametrize("how", SAID)
def test_what_fails_on_one_rank_is_said_on_all(how: str, tmp_path: Path) -> None:
    for rank, text in enumerate(launch(_fails, 3, how, str(tmp_path))):
        assert SAID[how] in text and one_sentence(text), (rank, text)
