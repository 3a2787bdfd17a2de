"""Layers of a PipelineModule that several stages have: the copies of tied ones, and a loss_fn with weights, which the last stage trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from axonn_plugins.hosts.deepspeed.agreement import agree
from axonn_plugins.optim.flat import FlatOptimizer
from axonn_tp import layout_of

_Copy = dict[str, tuple[tuple[int, ...], bool, str]]
"""For each of a copy's tensors its shape, true if it is trained, and how it is split."""


def tie(module: PipelineModule) -> None:
    """Make the copies of each tied layer one: give all that its stages have alike the values of the first.

    DeepSpeed ties what `tied_weight_attr` names, "weight" by default: on several stages a bias would be trained apart, which on
    one stage is the same tensor.

    Raises:
        ConfigError: on all ranks, copies differ in what is trained or how it is split.
    """
    if not any(isinstance(spec, TiedLayerSpec) for spec in module._layer_specs):
        return
    mine = {key: _describe(module, key) for key in module.tied_comms}
    everyone: list[dict[str, _Copy]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    problem: str | None = None
    for key, tied in module.tied_comms.items():
        copies = [everyone[rank][key] for rank in tied["ranks"]]
        names = [name for name in mine[key] if name in tied["weight_attr"] or _shared(name, copies)]
        different = [name for name in names if any(copy.get(name) != mine[key][name] for copy in copies)]
        if different:
            problem = (
                f"the tied layer {key!r} has a {different[0]!r} on several stages which differs there in its shape, in requires_grad or in "
                "how it is split; make it the same on all, or no TiedLayerSpec"
            )
        # The order of every stage.
        tied["weight_attr"] = sorted(names)
    agree(problem, {})
    for key, tied in module.tied_comms.items():
        copy = [_tensor(module, key, name) for name in tied["weight_attr"]]
        for parameter in module.tied_modules[key].parameters():
            counted = dist.get_rank() == tied["ranks"][0] or not any(parameter is tensor for tensor in copy)
            setattr(parameter, PIPE_REPLICATED, not counted)
    with torch.no_grad():
        module._synchronize_tied_weights()


def refuse_untied(module: PipelineModule) -> None:
    """Refuse a weight that layers of several stages have in common without being tied: each stage would train its own.

    Raises:
        ValueError: names the layers.
    """
    first: dict[int, int] = {}
    for number, spec in enumerate(module._layer_specs):
        for weight in _weights_of(spec):
            other = first.setdefault(id(weight), number)
            if weight.requires_grad and module.stage_owner(other) != module.stage_owner(number):
                raise ValueError(
                    f"layers {other} and {number} of the PipelineModule have a weight in common, and are on stages {module.stage_owner(other)} and "
                    f"{module.stage_owner(number)}, each of which would train its own; make both a TiedLayerSpec of one key, or give them weights each"
                )


def _weights_of(spec: Any) -> list[nn.Parameter]:
    """Parameters of a layer that is made already, or that one is made of."""
    held = [spec]
    if isinstance(spec, LayerSpec):
        held = [] if isinstance(spec, TiedLayerSpec) else [*spec.module_args, *spec.module_kwargs.values()]
    modules = [weight for one in held if isinstance(one, nn.Module) for weight in one.parameters()]
    return modules + [one for one in held if isinstance(one, nn.Parameter)]


def mark_loss(module: PipelineModule) -> None:
    """Note on the other stages that the weights of the loss_fn are the last one's."""
    for tensor in loss_tensors(module) if module.stage_id < module.num_stages - 1 else ():
        setattr(tensor, PIPE_REPLICATED, True)


def loss_tensors(module: PipelineModule) -> list[Tensor]:
    """Parameters and buffers of a loss_fn that is a module, the same on every stage but for their values."""
    loss = module.loss_fn
    return [*loss.parameters(), *loss.buffers()] if isinstance(loss, nn.Module) else []


@torch.no_grad()
def settle_loss(module: PipelineModule) -> dict[str, Tensor]:
    """Give all stages the last one's weights of the loss_fn, so that whichever writes them writes these; every rank calls it.

    Returns:
        What a checkpoint has of it; nothing where it has no weights.
    """
    grid, tensors = module._grid, loss_tensors(module)
    if module.num_stages > 1:
        for tensor in tensors:
            dist.broadcast(
                tensor.data, src=grid.stage_to_global(module.num_stages - 1), group=grid.get_pipe_parallel_group()
            )
    return {name: value.detach().clone() for name, value in module.loss_fn.state_dict().items()} if tensors else {}


def _describe(module: PipelineModule, key: str) -> _Copy:
    named = [(name, _tensor(module, key, name)) for name in module.tied_comms[key]["weight_attr"]]
    known = {id(tensor) for _, tensor in named}
    named += [(name, p) for name, p in module.tied_modules[key].named_parameters() if id(p) not in known]
    return {name: (tuple(t.shape), t.requires_grad, str(layout_of(t))) for name, t in named}


def _tensor(module: PipelineModule, key: str, name: str) -> Tensor:
    return module._recursive_getattr(module.tied_modules[key], name)


def _shared(name: str, copies: Sequence[_Copy]) -> bool:
    """True if copies, which may be of different classes, have a parameter of one name and shape."""
    shapes = {copy[name][0] if name in copy else None for copy in copies}
    return len(shapes) == 1 and None not in shapes


def sum_gradients(module: PipelineModule, optimizer: Any) -> None:
    """Sum the gradients of tied weights over their stages; DeepSpeed looks for them in `.grad` alone, and does not where there are none.

    Args:
        module: this stage's layers.
        optimizer: the engine's.
    """
    for weight, group in module.get_tied_weights_and_groups():
        if weight.requires_grad and _trained(weight, optimizer):
            dist.all_reduce(_gradient_of(weight, optimizer), group=group)


def _trained(weight: nn.Parameter, optimizer: Any) -> bool:
    return not isinstance(optimizer, FlatOptimizer) or any(entry.parameter is weight for entry in optimizer.entries)


def _gradient_of(weight: nn.Parameter, optimizer: Any) -> Tensor:
    """The sum so far of a weight's gradient, where its optimizer will look for it; zeros are put there where there is none."""
    if isinstance(optimizer, FlatOptimizer):
        return optimizer.gradient_of(weight)
    if isinstance(optimizer, BF16_Optimizer):
        group, place = next(
            (i, j) for i, weights in enumerate(optimizer.bf16_groups) for j, w in enumerate(weights) if w is weight
        )
        optimizer.fp32_groups_has_gradients[group][place] = True
        return optimizer.fp32_groups_gradients[group][place]
    name, dtype = "grad", weight.dtype
    if isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.use_grad_accum_attribute:
        name, dtype = "grad_accum", optimizer.gradient_accumulation_dtype
    if getattr(weight, name) is None:
        setattr(weight, name, torch.zeros_like(weight, dtype=dtype))
    return getattr(weight, name)
