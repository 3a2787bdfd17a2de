"""Our mesh inside Megatron's process groups: x and y are its tensor axis, z is the inner part of its data axis.

Megatron knows groups that divide the data axis: those of expert parallelism. Told that experts are spread over z, it
makes the groups that z needs, and sums gradients of parameters marked ``allreduce=False`` over data alone and their
norms over x, y and z. Only the call that makes the groups is told so; arguments and configs keep what they say of experts, which
lie on the same ranks as `expert_groups` has them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from axonn_plugins.hosts.megatron.expert_groups import blocks_of, topology_of
from axonn_plugins.hosts.megatron.groups import Communicators, MegatronMesh
from axonn_plugins.hosts.megatron.originals import Originals
from axonn_plugins.hosts.megatron.settings import Settings
from axonn_tp import Grid
from axonn_tp.comm.replicated import agree_on_bits

_originals = Originals()


@dataclass
class _Installed:
    settings: Settings
    mesh: MegatronMesh | None = None
    stages: int = 1


_installed: _Installed | None = None


def install(settings: Settings) -> None:
    """Have the next `parallel_state.initialize_model_parallel` make the groups of a grid.

    Called again, the last settings count; a mesh that is there stays until groups are made anew.
    """
    global _installed
    mesh = _installed.mesh if _installed is not None else None
    _installed = _Installed(settings, mesh)
    if not _originals:
        _originals.wrap(parallel_state, "initialize_model_parallel", _with_grid)


def uninstall() -> None:
    """Leave Megatron as it was before `install`; groups that were made stay."""
    global _installed
    _originals.restore()
    _installed = None


def settings() -> Settings:
    """The settings that `install` was given.

    Raises:
        RuntimeError: it was not called.
    """
    if _installed is None:
        raise RuntimeError("axonn3d is not installed: call axonn_plugins.hosts.megatron.patch.install(settings) first")
    return _installed.settings


def mesh() -> MegatronMesh:
    """The mesh of this rank's pipeline stage.

    Raises:
        RuntimeError: Megatron's process groups are not made yet.
    """
    if _installed is None or _installed.mesh is None:
        raise RuntimeError(
            "axonn3d's process groups are made by Megatron's initialize_model_parallel: call it before a model is built"
        )
    return _installed.mesh


def sharers() -> dist.ProcessGroup | None:
    """The ranks of x, y and z of this data-parallel replica; None where that is one rank."""
    here = mesh()
    if here.size("model") * here.size("z") == 1:
        return None
    # Those among which Megatron takes experts to be spread.
    return parallel_state.get_expert_tensor_and_model_parallel_group()


def stages() -> int:
    """Number of pipeline stages."""
    mesh()
    assert _installed is not None
    return _installed.stages


def device() -> str:
    """The type of the device that the process group is for."""
    return "cuda" if torch.cuda.is_available() and dist.get_backend() not in ("gloo", "pccl") else "cpu"


def _with_grid(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        assert _installed is not None
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        grid, stages = _grid(given.arguments, _installed.settings, dist.get_world_size())
        sizes = (given.arguments[f"expert_{kind}_parallel_size"] for kind in ("model", "tensor"))
        topology = topology_of(grid, *sizes)
        given.arguments["expert_model_parallel_size"] = blocks_of(grid, topology).known // topology.tensor
        given.arguments["expert_tensor_parallel_size"] = topology.tensor
        communicators = Communicators.of(given.arguments)
        original(*given.args, **given.kwargs)
        _installed.mesh = MegatronMesh(grid, device(), stages, communicators, topology)
        _installed.stages = stages
        agree_on_bits(_installed.mesh)

    return initialize_model_parallel


def _grid(arguments: dict[str, Any], settings: Settings, world: int) -> tuple[Grid, int]:
    """The grid of one pipeline stage, and how many stages there are, from what Megatron asks for.

    Raises:
        ValueError: the grid cannot lie inside Megatron's groups.
    """
    size, stages = arguments["tensor_model_parallel_size"], arguments["pipeline_model_parallel_size"]
    if size != settings.tensor:
        raise ValueError(
            f"tensor_model_parallel_size = {size} is not gx*gy = {settings.gx}*{settings.gy} = {settings.tensor}; "
            "give initialize_model_parallel that product"
        )
    shared = arguments.get("context_parallel_size") or 1
    for name in ("gtp_remat_size", "expert_gtp_remat_size"):
        if arguments.get(name, 1) not in (None, 1):
            raise ValueError(f"{name} = {arguments[name]} cannot be combined with axonn3d; set it to 1")
    order = arguments["order"]
    first = "tp-cp-" if shared > 1 else "tp-"
    if not order.startswith(first) or (stages > 1 and not order.endswith("-pp")):
        raise ValueError(
            f"order = {order!r}: axonn3d needs tensor parallelism innermost, context parallelism next and pipeline parallelism outermost; "
            'use "tp-cp-ep-dp-pp"'
        )
    if world % (settings.tensor * settings.gz * stages):
        raise ValueError(
            f"gx*gy*gz*stages = {settings.gx}*{settings.gy}*{settings.gz}*{stages} does not divide the {world} ranks of this "
            "run; choose sizes whose product does"
        )
    if world % (settings.tensor * shared * stages):
        raise ValueError(
            f"gx*gy*context_parallel_size*stages = {settings.gx}*{settings.gy}*{shared}*{stages} does not divide the {world} ranks of this "
            "run; choose sizes whose product does"
        )
    return Grid.for_world(world // stages, settings.gx, settings.gy, settings.gz), stages
