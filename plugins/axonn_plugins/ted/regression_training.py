"""Losses of a small MoE GPT through `deepspeed.initialize`: under the block ``axonn.ted``, and under stock DeepSpeed-MoE.

Stock has no tensor parallelism here: ranks that are tensor ranks in TED read the same tokens in both, so the mean over all
ranks is the mean over TED's data ranks, and the capacities are the same.
"""

from __future__ import annotations

import io
import zlib
from contextlib import redirect_stderr
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from axonn_plugins.ted.memory_measure import GPT
from ted_moe import Topology
from ted_moe.memory import Transformer

STEPS = 5
BARS = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Bars of losses by type; training is in float32, or in bfloat16."""


def difference(topology: Topology, dtype: torch.dtype, device: str) -> tuple[float, str]:
    """The largest relative difference of a step's loss, and which step's; every rank calls it."""
    with redirect_stderr(io.StringIO()):  # plans, and what DeepSpeed has to say
        expected = _losses(topology, dtype, device, None)
        found = _losses(topology, dtype, device, {"tensor": topology.tensor})
    steps = [abs(mine - theirs) / abs(theirs) for mine, theirs in zip(found, expected, strict=True)]
    worst = max(steps)
    return worst, f"loss of step {steps.index(worst) + 1}"


def _losses(topology: Topology, dtype: torch.dtype, device: str, block: dict[str, Any] | None) -> list[float]:
    """Mean loss of every step; unclipped, for at ZeRO-0 stock's norm is of the rank's own experts, and clipping is its default."""
    experts = -(-4 // topology.world) * topology.world
    sizes = Transformer(2, 16 * topology.world, 64, 16)
    deepspeed.utils.groups.mpu = None
    model = GPT(sizes, experts, topology.expert)
    place = dist.get_rank() // (1 if block is None else topology.tensor) % topology.expert
    _fill(model, place * experts // topology.expert)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1 if dtype == torch.bfloat16 else 0},
    }
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}
    if block is not None:
        config["axonn"] = {"ted": block}
    engine = deepspeed.initialize(model=model, config=config)[0]
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(STEPS):
        ids = torch.randint(64, (topology.data, 2, 12), generator=generator)[dist.get_rank() // topology.tensor]
        loss = engine(ids.to(device))
        engine.backward(loss)
        engine.step()
        total = loss.detach().float()
        dist.all_reduce(total)
        losses.append(total.item() / topology.world)
    engine.destroy()
    return losses


@torch.no_grad()
def _fill(model: nn.Module, first: int) -> None:
    """Give every parameter values that follow from its name, experts by their number among all."""
    for name, parameter in model.named_parameters():
        before, experts, after = name.partition(".deepspeed_experts.")
        number, _, rest = after.partition(".")
        full = f"{before}{experts}{int(number) + first}.{rest}" if experts else name
        generator = torch.Generator().manual_seed(zlib.crc32(full.encode()))
        values = 0.5 * torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
        of_norm = parameter.dim() == 1 and name.endswith("weight")
        parameter.copy_(values + of_norm)
