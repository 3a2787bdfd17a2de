"""States of optimizers over split parameters as those of one process, in torch's own form: any grid, or none, reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common.split_states import own_part, parameters_of
from axonn_tp import Mesh, layout_of
from axonn_tp.checkpoint.whole import assemble
from axonn_tp.layers.exports import as_shards


@torch.no_grad()
def whole_state(optimizer: Optimizer, mesh: Mesh) -> dict[str, Any]:
    """Its state dict with tensors of the serial parameters' shapes, on the CPU of rank 0; every rank calls it.

    Returns:
        The state dict on rank 0, nothing on the others.

    Raises:
        ConfigError: a state is neither of its parameter's shape nor one number; the same on every rank.
    """
    with as_shards():
        first, held = dist.get_rank() == 0, optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(parameters_of(optimizer)):
        for key, value in sorted(held["state"].get(number, {}).items()):
            whole = _whole(optimizer, key, value, parameter, mesh)
            if first:
                state.setdefault(number, {})[key] = whole
    return {**held, "state": state} if first else {}


def _whole(optimizer: Optimizer, key: str, value: Any, parameter: Tensor, mesh: Mesh) -> Any:
    layout = layout_of(parameter)
    if not isinstance(value, Tensor):
        return value
    if value.shape != parameter.shape:
        if value.dim() and layout.axes:
            raise ConfigError(
                f"{type(optimizer).__name__} keeps a state {key} of shape {tuple(value.shape)} for a parameter that is split into shapes "
                f"{tuple(parameter.shape)}, and no other grid could read it; use an element-wise optimizer such as AdamW, or save weights alone"
            )
        return value.detach().cpu().clone()
    own = value.detach().contiguous()
    if not layout.axes:
        return own.cpu().clone()
    shards = [torch.empty_like(own) for _ in range(mesh.grid.world)] if dist.get_rank() == 0 else None
    dist.gather(own, shards, dst=0)
    return None if shards is None else assemble(shards, layout, mesh)[0].cpu()


def own_state(optimizer: Optimizer, whole: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """This rank's part of a state dict with tensors of the serial parameters' shapes.

    Raises:
        ConfigError: it is of other parameters.
    """
    parameters, state = parameters_of(optimizer), {}
    saved = sum(len(group["params"]) for group in whole["param_groups"])
    if saved != len(parameters):
        raise ConfigError(
            f"the checkpoint's {type(optimizer).__name__} has {saved} parameters and this run's {len(parameters)}; give it the same parameters"
        )
    for number, values in whole["state"].items():
        parameter = parameters[number]
        state[number] = {key: own_part(value, parameter, mesh) for key, value in values.items()}
    return {**whole, "state": state}
