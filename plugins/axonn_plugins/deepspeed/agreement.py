"""Whether all ranks can go on, and with the same thing, before any of them splits the model."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from axonn_plugins.config import Axonn, ConfigError
from axonn_plugins.deepspeed.sections import needs_whole_matrices
from axonn_tp import LayerPlan


def agree(problem: str | None, digest: str, offer: Any = None) -> Any:
    """Go on only if all ranks can, and with the same thing.

    Returns:
        What rank 0 offers.

    Raises:
        ConfigError: the same on every rank.
    """
    mine = (problem, digest, offer)
    everyone: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(everyone, mine)
    except RuntimeError:
        raise ConfigError("another rank ended before the model was split; its own message says why") from None
    for rank, (trouble, *_) in enumerate(everyone):
        if trouble is not None:
            alone = not all(other for other, *_ in everyone)
            raise ConfigError(f"rank {rank}: {trouble}" if alone else trouble)
    different = [rank for rank, (_, other, _) in enumerate(everyone) if other != everyone[0][1]]
    if different:
        raise ConfigError(
            f"rank {different[0]} has another axonn block or model than rank 0; start all ranks with the same configuration and script"
        )
    return everyone[0][2]


def fingerprint(model: nn.Module, block: Axonn, plan: dict[str, LayerPlan]) -> str:
    """What must be the same on all ranks."""
    shapes = [(name, list(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    return hashlib.sha256(json.dumps([block.model_dump(), repr(plan), shapes]).encode()).hexdigest()


def check_shapes(model: nn.Module) -> None:
    """Refuse parameters without a shape.

    Raises:
        ValueError: names the first.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter {name} has no shape yet; run the model once before deepspeed.initialize")


def refuse_experts(model: nn.Module) -> None:
    """Refuse DeepSpeed's mixtures of experts.

    Raises:
        ValueError: names the first.
    """
    from deepspeed.moe.layer import MoE

    for name, module in model.named_modules():
        if isinstance(module, MoE):
            raise ValueError(
                f"layer {name} is a DeepSpeed MoE, which does not go with tensor_parallel; use axonn.ted in its place"
            )


def check_optimizer(optimizer: Any) -> None:
    """Refuse optimizers that are not element-wise.

    Raises:
        ValueError: names it.
    """
    if optimizer is not None and needs_whole_matrices(type(optimizer).__name__):
        raise ValueError(
            f"the optimizer {type(optimizer).__name__} needs whole weight matrices, which are split; use an element-wise one such as AdamW"
        )
