"""States of an optimizer for parts of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakSet

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
    on = mesh.over(layout.grid)  # experts lie on another grid of the same ranks
    return layout.shard(value, on.grid, on.coordinates)


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


_late: WeakSet[Optimizer] = WeakSet()


def note_late_groups() -> None:
    """From now on optimizers that are given parameters which are split already are known."""
    original = Optimizer.add_param_group
    if getattr(original, "axonn", False):
        return

    @wraps(original)
    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        original(self, param_group)
        if any(layout_of(parameter).axes for parameter in self.param_groups[-1]["params"]):
            _late.add(self)

    add_param_group.axonn = True  # type: ignore[attr-defined]
    Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def sorted_by_shards(optimizer: Optimizer, models: Iterable[nn.Module]) -> bool:
    """True if its groups may be by the numbers of dimensions of shards, which are flat along z; never false where they are.

    Sorted so, flat matrices and vectors are in one group, and something is in another or left out.
    """
    groups, trained = [group["params"] for group in optimizer.param_groups], set(parameters_of(optimizer))
    if optimizer not in _late:
        return False
    own = [[p for p in model.parameters() if p.requires_grad] for model in models]
    own = [parameters for parameters in own if not trained.isdisjoint(parameters)]
    left_out = any(not trained.issuperset(parameters) for parameters in own)
    vectors = any(len(layout_of(p).serial_shape) <= 1 for parameters in own for p in parameters)
    return (len(groups) > 1 or left_out) and any(
        any(_is_flat(p) for p in group) and (not vectors or any(len(layout_of(p).serial_shape) <= 1 for p in group))
        for group in groups
    )


def _is_flat(parameter: Tensor) -> bool:
    return parameter.dim() <= 1 < len(layout_of(parameter).serial_shape)
