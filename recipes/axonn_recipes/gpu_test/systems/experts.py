"""TED beside stock DeepSpeed-MoE, and both beside all experts in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from torch import nn

from axonn_recipes.gpu_test.scale import ROUNDED, Check, Found, Scale, apart
from axonn_recipes.gpu_test.systems.engines import losses, prepare, stepper
from axonn_recipes.gpu_test.training import serial, timed
from axonn_recipes.models.gpt import GPTConfig
from axonn_recipes.models.moe_gpt import MoEGPT


def run(scale: Scale) -> Found:
    """Losses with experts over all data ranks, whole and in halves; no token is dropped, so that the readers do not matter."""
    prepare()
    expected, found = serial(scale, partial(mixture, scale.compared, scale.ranks, 1)), Found()
    tensors = [1, 2] if scale.ranks % 2 == 0 else [1]
    for tensor in tensors:
        block = {"ted": {"tensor": tensor}}
        mine = losses(scale, _mine(scale.compared, scale.ranks, tensor), block)
        found.checks.append(Check(f"tensor={tensor}: losses", apart(mine, expected.losses), ROUNDED))
    for tensor in tensors:
        made = partial(stepper, scale, block={"ted": {"tensor": tensor}})
        build = partial(_built, made, scale.timed, scale.ranks, tensor)
        found.sides.append(timed(f"axonn.ted, tensor={tensor}", True, build, scale))
    build = partial(_built, partial(stepper, scale, block=None), scale.timed, scale.ranks, 1)
    found.sides.append(timed("stock DeepSpeed-MoE", False, build, scale))
    return found


def mixture(config: GPTConfig, experts: int, degree: int, place: int = 0) -> nn.Module:
    """A GPT with experts in every second block, which takes all tokens; an expert's weights follow from its number among all.

    Args:
        config: sizes of the dense model.
        experts: of a layer.
        degree: ranks over which they are dealt out.
        place: this rank's among them.
    """
    deepspeed.utils.groups.mpu = None
    gates: dict[str, Any] = {"k": 1, "use_rts": False, "drop_tokens": False, "min_capacity": 1}
    torch.manual_seed(1)
    model = MoEGPT(config, lambda hidden, expert: MoE(hidden, expert, experts, degree, **gates), aux_weight=0.0)
    torch.manual_seed(2)
    for name, parameter in sorted(model.named_parameters()):
        if ".deepspeed_experts." not in name:
            nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else None
    for layer, module in enumerate(module for module in model.modules() if isinstance(module, MoE)):
        local = module.deepspeed_moe.experts.deepspeed_experts
        for number, expert in enumerate(local, place * len(local)):
            torch.manual_seed(1000 * (1 + layer) + number)
            expert.fc1.reset_parameters()
            expert.fc2.reset_parameters()
    return model


def _mine(config: GPTConfig, ranks: int, tensor: int) -> nn.Module:
    degree = ranks // tensor
    return mixture(config, ranks, degree, torch.distributed.get_rank() // tensor)


def _built(made: Any, config: GPTConfig, ranks: int, tensor: int) -> Any:
    return made(_mine(config, ranks, tensor))
