"""The split of a pipeline stage's layers over its tensor-parallel ranks, and the places of their checkpoints.

The activation between two layers that no pair spans is whole on every rank of x and y, and so is what goes to the next stage.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from torch import nn

from axonn_plugins.config import Axonn, ConfigError, Ted, TensorParallel
from axonn_plugins.hosts.common.tensor_parallel import layer_plans, options
from axonn_plugins.hosts.deepspeed.agreement import agree, check_shapes, refuse_experts
from axonn_plugins.hosts.deepspeed.ted.layers import stand_ins
from axonn_tp import Grid, LayerPlan, Mesh, Placement, auto_plan, place

KEY = "axonn.tensor_parallel"
AXES = (["pipe", "data"], ["pipe", "data", "model"])
_WITHIN = ("normal", "transposed", "head", "self_contained", "group_norm", "replicated")


def key_of(block: Axonn) -> str:
    """The key by which a block has dense layers split, for sentences."""
    return f"axonn.ted.tensor = {block.ted.tensor}" if block.tensor_parallel is None and block.ted is not None else KEY


def stage_grid(settings: TensorParallel, unit: PipelineParallelGrid, key: str = KEY) -> Grid:
    """The grid of one stage.

    Args:
        settings: the block's.
        unit: of the PipelineModule.
        key: see `key_of`.

    Raises:
        ConfigError: the sizes do not divide a stage's ranks, or the module's topology is another.
    """
    topology, world = unit.topology(), unit.world_size
    stages, sizes = unit.get_pipe_parallel_world_size(), settings.given
    ranks, plane = world // stages, sizes["gx"] * sizes["gy"]
    if topology.get_axis_names() not in AXES:
        raise ConfigError(
            f"the PipelineModule's topology has the axes {', '.join(topology.get_axis_names())}, and {key} needs pipe, data or pipe, data, "
            "model; give num_stages in its place"
        )
    if unit.get_slice_parallel_world_size() not in (1, plane):
        split = f"{KEY} has gx*gy = {plane}" if key == KEY else f"the block {key}"
        raise ConfigError(
            f"the PipelineModule's topology has a model axis of {unit.get_slice_parallel_world_size()}, and {split}; make them equal, or give "
            "num_stages in place of the topology"
        )
    try:
        return Grid.for_world(ranks, **sizes, sequence=settings.sequence)
    except ValueError:
        words = "*".join(str(size) for size in sizes.values())
        split, better = (
            (f"{KEY}: gx*gy*gz = {words}", "sizes whose product divides") if key == KEY else (key, "a divisor of")
        )
        raise ConfigError(
            f"{split} does not divide the {ranks} ranks of a stage ({world} ranks, {stages} stages); choose {better} {ranks}"
        ) from None


def regroup(module: PipelineModule, mesh: Mesh) -> None:
    """Give a PipelineModule the groups of the mesh: ranks that read the same samples are DeepSpeed's model axis, the others its data."""
    grid = mesh.grid
    topology = PipeModelDataParallelTopology(
        num_pp=module.num_stages, num_mp=mesh.size("replicas"), num_dp=mesh.size("readers")
    )
    module._topo = topology
    module._grid = PipelineParallelGrid(topology=topology)
    for parameter in module.parameters():
        parameter.ds_pipe_replicated = False
    module.tied_comms = module._index_tied_modules()
    if not isinstance(module, StageFiles):
        kind = type(module)
        module.__class__ = type(kind.__name__, (StageFiles, kind), {})
    module.axonn_place = mesh.coordinates["x"] + grid.gx * (mesh.coordinates["y"] + grid.gy * mesh.coordinates["z"])
    module.axonn_writes = mesh.coordinates["data"] == 0


class StageFiles(PipelineModule):
    """A PipelineModule that keeps a file of every layer for each (x, y, z), in DeepSpeed's layout.

    Attributes:
        axonn_place: this rank's number among the tensor-parallel ranks of its stage.
        axonn_writes: whether it is the one of its data-parallel replicas that writes.
    """

    axonn_place: int
    axonn_writes: bool

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """The file of one layer."""
        layer = local_layer_idx + self._local_start
        return os.path.join(ckpt_dir, f"layer_{layer:02d}-model_{self.axonn_place:02d}-model_states.pt")

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """This rank's file, as often as DeepSpeed expects files."""
        return [self.ckpt_layer_path(ckpt_dir, local_layer_idx)] * self._grid.get_slice_parallel_world_size()

    def save_state_dict(self, *rest: Any, **keywords: Any) -> None:
        """Write this rank's files of all layers; DeepSpeed takes ranks along z for replicas."""
        if not self.axonn_writes:
            return
        grid = self._grid
        before = grid.data_parallel_id, grid.data_parallel_size
        grid.data_parallel_id, grid.data_parallel_size = 0, 1
        try:
            super().save_state_dict(*rest, **keywords)
        finally:
            grid.data_parallel_id, grid.data_parallel_size = before


def settings_of(block: Axonn) -> TensorParallel | None:
    """The settings by which a block has dense layers split; None: not at all."""
    if block.tensor_parallel is not None or block.ted is None:
        return block.tensor_parallel
    return TensorParallel.model_validate({"gx": block.ted.tensor, "plan": "auto"})


def stage_plan(
    module: PipelineModule, settings: TensorParallel, grid: Grid, experts: Ted | None = None, key: str = KEY
) -> dict[str, LayerPlan]:
    """The plan of this rank's stage; every rank calls it.

    Args:
        module: the stage.
        settings: the block's.
        grid: of the stage.
        experts: how experts are split; None: there are none.
        key: see `key_of`.

    Raises:
        ConfigError: on all ranks, the plan does not fit the model.
    """
    given = layer_plans(settings)
    names = [name for name, _ in module.named_modules()]
    mine = [pattern for pattern in given if any(fnmatchcase(name, pattern) for name in names)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    problem, plan = None, {pattern: given[pattern] for pattern in mine}
    try:
        check_shapes(module)
        if experts is None:
            refuse_experts(module)
        _check_patterns(given, {pattern for found in everyone for pattern in found})
        if settings.plan == "auto":
            with stand_ins(module, boundary=True):
                plan = _found(module, grid)
        _check_pairs(place(module, grid, plan, options(settings)), module)
    except ValueError as error:
        problem = f"{key + '.plan' if key == KEY else key}: {str(error).removeprefix('plan: ')}"
    agree(problem, {})
    return plan


def _check_patterns(given: Mapping[str, LayerPlan], found: set[str]) -> None:
    for pattern, layer in given.items():
        if layer.kind not in _WITHIN:
            raise ValueError(
                f"{pattern!r} is {layer.kind}, which splits what goes from layer to layer, and between the stages of a pipeline that is whole; "
                f"use {', '.join(_WITHIN)}"
            )
        if pattern not in found:
            raise ValueError(f"{pattern!r} matches no layer of any stage; correct it")


def _check_pairs(placements: Sequence[Placement], module: PipelineModule) -> None:
    """Refuse a pair of which a stage has one half, whose partner would be given a share."""
    alone: str | None = None
    # Within one of the pipeline's layers, which no boundary cuts, a module may declare its layers in any order.
    for _, inside in groupby(placements, lambda placement: placement.name.partition(".")[0]):
        found = {placement.kind: placement.name for placement in inside}
        if "transposed" in found and "normal" not in found and alone is None:
            alone = found["transposed"]
            break
        if "normal" in found or "transposed" in found:
            alone = None if "transposed" in found else found["normal"]
    if alone is not None:
        raise ValueError(
            f"layer {alone} and its partner are on different stages, stage {module.stage_id} being one; move the boundary, or name both "
            "self_contained"
        )


class StageLayers(nn.Module):
    """A stage's layers without its groups, which cannot be copied."""

    def __init__(self, module: PipelineModule) -> None:
        super().__init__()
        for name, child in module.named_children():
            if child is not module.loss_fn:
                self.add_module(name, child)
        self.functions = list(module.forward_funcs)

    def forward(self, x: Any) -> Any:  # noqa: D102
        for function in self.functions:
            x = function(x)
        return x


def _found(module: PipelineModule, grid: Grid) -> dict[str, LayerPlan]:
    """The pairs within this stage."""
    plan, report = auto_plan(StageLayers(module), grid)
    if module._grid.data_parallel_id == 0 and module._grid.get_slice_parallel_rank() == 0:
        print(f"axonn: stage {module.stage_id}: {report}", file=sys.stderr, flush=True)
    return {name: layer for name, layer in plan.items() if layer.kind in ("normal", "transposed", "group_norm")}
