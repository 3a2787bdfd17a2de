"""One MoE GPT: in a plain loop of one process with all experts, and a stock DeepSpeed-MoE script under ``axonn.ted``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from torch import nn

from axonn_recipes.models.gpt import GPTConfig
from axonn_recipes.models.moe_gpt import MoEGPT
from tests import groups

STEPS, ACCUMULATION, EXPERTS, DATA = 3, 2, 4, 8
HALVES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-3, "fp64": 1e-10}
CHECKPOINTS = {
    "none": None,
    "reentrant": lambda block, x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True),
    "torch": lambda block, x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False),
    "deepspeed": lambda block, x: deepspeed.checkpointing.checkpoint(block, x),
    "deepspeed, not reentrant": non_reentrant_checkpoint,
}


@dataclass
class Case:
    ted: dict[str, Any] | None
    ep_size: int = 1
    stage: int = 0
    dtype: str = "fp32"
    k: int = 2
    checkpoint: str = "none"
    residual: bool = False
    seed: int = 2
    clip: float = 0.5
    extra: dict[str, Any] = field(default_factory=dict)

    def model(self, ep_size: int) -> MoEGPT:
        torch.manual_seed(1)

        def moe(hidden: int, expert: nn.Module) -> nn.Module:
            gates = {"use_rts": False, "top2_2nd_expert_sampling": False}
            sizes = {"capacity_factor": 0.9, "min_capacity": 1, "use_residual": self.residual}
            return MoE(hidden, expert, EXPERTS, ep_size, k=self.k, **gates, **sizes)

        config = GPTConfig(vocabulary=50, context=5, layers=2, heads=8, hidden=32)
        return MoEGPT(config, moe, checkpoint=CHECKPOINTS[self.checkpoint])

    def serial(self) -> MoEGPT:
        """All experts, each other ones."""
        deepspeed.utils.groups.mpu = None
        model = self.model(1)
        torch.manual_seed(self.seed)
        for parameter in model.parameters():
            parameter.data = 0.2 * torch.randn(parameter.shape) + (parameter.dim() == 1)
        return model

    def batches(self, data: int) -> Any:
        """By step, accumulation and data rank."""
        torch.manual_seed(3)
        return torch.randint(50, (STEPS, ACCUMULATION, data, DATA // data, 6))

    @property
    def tensor(self) -> int:
        return (self.ted or {}).get("tensor", 1)


Curves = tuple[list[float], list[float]]
_runs: dict[tuple, Curves] = {}  # by all of a case that they depend on


def serial_run(case: Case, data_ranks: list[int]) -> Curves:
    """Losses and norms of one process; each such run once."""
    key = (case.dtype, case.k, case.checkpoint, case.residual, case.seed, case.clip, *data_ranks)
    if key not in _runs:
        _runs[key] = _serial_run(case, data_ranks)
    return _runs[key]


def _serial_run(case: Case, data_ranks: list[int]) -> Curves:
    """Losses and norms of a plain loop over the data ranks' parts, so many at each step; half precision has float32 masters."""
    model = case.serial().to(HALVES[case.dtype])
    masters = [
        nn.Parameter(p.detach().clone().to(torch.promote_types(p.dtype, torch.float32))) for p in model.parameters()
    ]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for number, data in enumerate(data_ranks):
        step = case.batches(data)[number]
        total = 0.0
        for micro in step:
            for ids in micro:
                loss = model(ids[:, :-1], ids[:, 1:])
                (loss / (data * ACCUMULATION)).backward()
                total += loss.item() / (data * ACCUMULATION)
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad = torch.zeros_like(master) if parameter.grad is None else parameter.grad.to(master.dtype)
            parameter.grad = None
        norms.append(nn.utils.clip_grad_norm_(masters, case.clip or math.inf).item())
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
        losses.append(total)
    return losses, norms


def start(case: Case, mpu: Any = None) -> Any:
    import axonn_plugins

    groups.reuse()
    type(get_accelerator()).is_fp16_supported = lambda self: True
    axonn_plugins.activate()
    full = case.serial().state_dict()
    model = case.model(case.ep_size)
    local = EXPERTS // case.ep_size
    tensor = mpu.get_model_parallel_world_size() if mpu is not None else case.tensor
    wide = tensor if (case.ted or {}).get("expert_tensor_parallel", True) else 1
    first = dist.get_rank() // wide % case.ep_size * local
    mine = {}
    for name in model.state_dict():
        before, experts, after = name.partition(".deepspeed_experts.")
        number, _, rest = after.partition(".")
        mine[name] = full[f"{before}{experts}{int(number) + first}.{rest}" if experts else name]
    model.load_state_dict(mine)
    config = {
        "train_micro_batch_size_per_gpu": DATA * tensor // dist.get_world_size(),
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": case.clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": case.stage, "reduce_bucket_size": 10**5, "allgather_bucket_size": 10**5},
    }
    if case.ted is not None:
        config["axonn"] = {"ted": case.ted}
    if case.dtype in ("bf16", "fp16"):
        config[case.dtype] = {"enabled": True} | ({"loss_scale": 1.0} if case.dtype == "fp16" else {})
    if case.dtype == "fp64":
        model = model.double()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config | case.extra, mpu=mpu)[
        0
    ]


def train(engine: Any, case: Case, steps: slice = slice(None)) -> tuple[list[float], list[float]]:
    group = engine.data_parallel_group
    rank, data = dist.get_rank(group), dist.get_world_size(group)
    losses, norms = [], []
    for step in case.batches(data)[steps]:
        total = torch.zeros((), dtype=torch.float64)
        for micro in step:
            loss = engine(micro[rank][:, :-1], micro[rank][:, 1:])
            engine.backward(loss)
            engine.step()
            total += loss.detach().double() / ACCUMULATION
        dist.all_reduce(total, group=group)
        losses.append(total.item() / data)
        norms.append(float(engine.get_global_grad_norm() or 0))  # stock ZeRO-0 has none
    return losses, norms
