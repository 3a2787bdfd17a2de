"""States of an optimizer for parts of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from axonn_tp import Mesh, layout_of


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that it updates, in the order of its groups, which is that of its state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def own_part(value: Any, parameter: Tensor, mesh: Mesh) -> Any:
    """This rank's part of a state of the serial parameter's shape; anything else is returned."""
    layout = layout_of(parameter)
    if not isinstance(value, Tensor) or not layout.axes or value.shape != torch.Size(layout.serial_shape):
        return value
    return layout.shard(value, mesh.grid, mesh.coordinates)


def split_states(optimizer: Optimizer, mesh: Mesh) -> None:
    """States that were made beside serial parameters become this rank's parts, once the parameters are split."""
    for parameter in parameters_of(optimizer):
        held = optimizer.state.get(parameter, {})
        held.update({key: own_part(value, parameter, mesh) for key, value in held.items()})


@contextmanager
def whole_shapes(model: nn.Module) -> Iterator[None]:
    """Inside, parameters of a split model have the serial ones' shapes, without values or memory, for code that sorts them by these."""
    held = {parameter: parameter.data for parameter in model.parameters() if layout_of(parameter).axes}
    for parameter, data in held.items():
        parameter.data = data.new_zeros(()).expand(layout_of(parameter).serial_shape)
    try:
        yield
    finally:
        for parameter, data in held.items():
            parameter.data = data


def sorted_by_shards(optimizer: Optimizer) -> bool:
    """True if its groups look as if parameters had been sorted by the shapes of shards, which are flat along z."""
    groups = [group["params"] for group in optimizer.param_groups]
    matrices = any(all(parameter.dim() > 1 for parameter in group) for group in groups)
    vectors = [group for group in groups if group and all(parameter.dim() <= 1 for parameter in group)]
    return matrices and any(len({len(layout_of(p).serial_shape) > 1 for p in group}) == 2 for group in vectors)
