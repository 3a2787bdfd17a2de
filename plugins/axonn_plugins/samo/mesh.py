"""Pruning a model that `axonn_tp` has split: one threshold over all of its shards."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import samo
from axonn_tp.comm.gradients import sync_gradients
from axonn_tp.grid.layout import layout_of
from axonn_tp.grid.mesh import Mesh


def positions_of(parameter: Tensor, mesh: Mesh) -> Tensor:
    """Where each element of this rank's part of a parameter is in the whole, flattened; −1 for padding.

    Returns:
        int64, of the part's shape.
    """
    layout = layout_of(parameter)
    numbers = torch.arange(1, math.prod(layout.serial_shape) + 1, device=parameter.device).view(layout.serial_shape)
    on = mesh.over(layout.grid)
    return layout.shard(numbers, on.grid, on.coordinates) - 1


def shards_of(mesh: Mesh, stages: Callable[[str], int] = lambda _: 1) -> samo.Shards:
    """Shards of parameters on a mesh, for `samo.magnitude(..., shards=...)` and `samo.EarlyBird`; masks are those of the serial model.

    Args:
        mesh: the mesh that the model was split over.
        stages: how many stages of a pipeline hold a parameter of this name.
    """
    whole_world = torch.distributed.group.WORLD
    assert whole_world is not None

    def find(name: str, parameter: Tensor) -> samo.Shard:
        layout = layout_of(parameter)
        on = mesh.over(layout.grid)
        copies = math.prod(on.size(axis) for axis in ("x", "y", "z", "data") if axis not in layout.axes)
        inputs = 0 if layout.transposed else 1
        return samo.Shard(layout.serial_shape, copies * stages(name), lambda: positions_of(parameter, mesh), inputs)

    return samo.Shards(whole_world, find, lambda parameters: sync_gradients(parameters, mesh), mesh.device)
