"""One training run three times: under the engine with the samo block, with samo.Optimizer, and dense with masks in one process."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

# Imported here, so that forked ranks need not.
import deepspeed  # noqa: E402
import deepspeed.ops.op_builder.all_ops  # noqa: E402
import numpy  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402

import axonn_plugins.hosts.common.composition  # noqa: E402, F401
import samo  # noqa: E402
from axonn_plugins.cluster.launch import launch  # noqa: E402

STEPS, BATCH = 6, 3
DYNAMIC = {"initial_scale_power": 4, "loss_scale_window": 3, "hysteresis": 1, "min_loss_scale": 1}
SEARCH = {"early_bird": {"interval": 1, "window": 2, "epsilon": 0.5}}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def network() -> nn.Module:
    """Matrices to prune, vectors, a table, a frozen layer."""
    torch.manual_seed(11)
    model = nn.Sequential(
        nn.Embedding(13, 24), nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40), nn.LayerNorm(40), nn.Linear(40, 5)
    )
    model[3].bias.requires_grad_(False)
    return model


@dataclass
class Case:
    """A run and how DeepSpeed is told to train."""

    block: dict[str, Any] = field(default_factory=lambda: {"sparsity": 0.9})
    dtype: str = "fp32"
    accumulation: int = 1
    clip: float = 0.0
    # config: optimizer in the configuration; client: an instance; callable: a function of the parameters.
    optimizer: str = "config"
    # config: a scheduler in the configuration; client: an instance; callable: a function of the optimizer.
    scheduler: str | None = None
    scale: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    blow_up: int | None = None
    # The same data on every rank, so that runs on other numbers of ranks compare.
    same: bool = False

    def model(self) -> nn.Module:
        return network().to(DTYPES[self.dtype] if self.dtype == "fp64" else torch.float32)

    def batches(self, ranks: int) -> list[list[tuple[Tensor, Tensor]]]:
        """For each step its micro-batches of all ranks."""
        generator = torch.Generator().manual_seed(5)
        kind = DTYPES[self.dtype]
        return [
            [
                (
                    torch.randint(13, (BATCH * ranks, 4), generator=generator),
                    torch.randn(BATCH * ranks, 4, 5, generator=generator).to(kind),
                )
                for _ in range(self.accumulation)
            ]
            for _ in range(STEPS)
        ]

    def loss(self, output: Tensor, target: Tensor, step: int) -> Tensor:
        factor = 1e8 if step == self.blow_up else 1.0
        return (output.float() if self.dtype != "fp64" else output).sub(target).square().mean() * factor

    def optimizer_of(self, parameters: Any, fused: bool | None = None) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, fused=fused)


def ready() -> None:
    """Prepare a rank."""
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")


def run(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """Run a function on each rank, and return its results; torch would send tensors by handles that end with the rank."""
    found = launch(_as_arrays, ranks, function, arguments)
    return tree_map(lambda leaf: torch.from_numpy(leaf) if isinstance(leaf, numpy.ndarray) else leaf, found)


def _as_arrays(function: Callable[..., Any], arguments: tuple) -> Any:
    return tree_map(lambda leaf: leaf.numpy() if isinstance(leaf, Tensor) else leaf, function(*arguments))


def masks_of(engine: Any) -> dict[str, Tensor]:
    """By what an engine's model is pruned."""
    return engine._pruning.masks(engine.optimizer)


def half_life(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def config_of(case: Case) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clip,
        "steps_per_print": 10**9,
        "axonn": {"samo": case.block},
    }
    if case.optimizer == "config":
        params = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}
        config["optimizer"] = {"type": "AdamW", "params": params}
    if case.scheduler == "config":
        config["scheduler"] = {"type": "ExponentialLR", "params": {"gamma": 0.7}}
    if case.dtype in ("bf16", "fp16"):
        config[case.dtype] = {"enabled": True} | ({} if case.scale is None else case.scale)
    return config | copy.deepcopy(case.extra)


def start(case: Case, model: nn.Module | None = None) -> Any:
    """The engine, as a script makes it."""
    # DeepSpeed looks for instructions that this processor need not have; torch computes in fp16 without.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    model = case.model() if model is None else model
    keywords: dict[str, Any] = {}
    parameters = [p for p in model.parameters() if p.requires_grad]
    if case.optimizer == "client":
        keywords["optimizer"] = case.optimizer_of(parameters)
    elif case.optimizer == "callable":
        keywords["optimizer"] = case.optimizer_of
    if case.scheduler == "client":
        keywords["lr_scheduler"] = half_life(keywords["optimizer"])
    elif case.scheduler == "callable":
        keywords["lr_scheduler"] = half_life
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config_of(case), **keywords)[0]


def mine(case: Case, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's part."""
    if case.same:
        return batch
    part = slice(dist.get_rank() * BATCH, (dist.get_rank() + 1) * BATCH)
    return batch[0][part], batch[1][part]


def train(engine: Any, case: Case, steps: range = range(STEPS), each: Callable[[], None] | None = None) -> list[Any]:
    """Losses of this rank, norms, scales and skipped steps."""
    found = []
    batches = case.batches(1 if case.same else dist.get_world_size())
    for step in steps:
        losses = []
        for batch in batches[step]:
            ids, target = mine(case, batch)
            loss = case.loss(engine(ids), target, step)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append((losses, engine.get_global_grad_norm(), engine.optimizer.cur_scale, engine.skipped_steps))
        if each is not None:
            each()
    return found


def plain(case: Case, scale: samo.LossScale | float | None = None) -> list[Any]:
    """The same with samo.Optimizer in a plain loop, on the same ranks."""
    model = case.model().to(DTYPES[case.dtype])
    masks = samo.magnitude(model, case.block["sparsity"])
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = samo.Optimizer(
        lambda groups: case.optimizer_of(groups, fused=True),
        named,
        masks,
        max_norm=case.clip or None,
        loss_scale=scale,
        group=dist.group.WORLD,
    )
    scheduler = half_life(optimizer) if case.scheduler else None
    found, skipped = [], 0
    for step, batches in enumerate(case.batches(dist.get_world_size())):
        losses = []
        for number, batch in enumerate(batches):
            ids, target = mine(case, batch)
            loss = case.loss(model(ids), target, step)
            optimizer.reducer.active = number == len(batches) - 1
            optimizer.scale(loss / case.accumulation).backward()
            losses.append(loss.item())
        optimizer.step()
        skipped += optimizer.overflow
        if scheduler is not None and not optimizer.overflow:
            scheduler.step()
        norm = (
            None
            if optimizer.total_norm is None
            else float("inf")
            if optimizer.overflow
            else optimizer.total_norm.item()
        )
        found.append((losses, norm, 1.0 if optimizer.loss_scale is None else optimizer.loss_scale.scale, skipped))
    return found


def dense(case: Case, masks_at: dict[int, dict[str, Tensor]], ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """The mean losses and the weights of masked dense training of all ranks' batches in one process.

    Args:
        case: the run.
        masks_at: masks by the step after which they hold; 0: from the start.
        ranks: whose batches.
    """
    model = case.model()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = case.optimizer_of(parameters.values())
    scheduler = half_life(optimizer) if case.scheduler else None
    masks: dict[str, Tensor] = {}
    found = []
    for step, batches in enumerate(case.batches(ranks)):
        if step in masks_at:
            masks = masks_at[step]
            for name, mask in masks.items():
                for tensor in [parameters[name].data, *optimizer.state.get(parameters[name], {}).values()]:
                    if tensor.dim():
                        tensor.mul_(mask)
        total = 0.0
        optimizer.zero_grad()
        for ids, target in batches:
            loss = case.loss(model(ids), target, step) / case.accumulation
            loss.backward()
            total += loss.item()
        for name, mask in masks.items():
            parameters[name].grad.mul_(mask)  # type: ignore[union-attr]
        if case.clip:
            torch.nn.utils.clip_grad_norm_(parameters.values(), case.clip)
        optimizer.step()
        for name, mask in masks.items():
            parameters[name].data.mul_(mask)
        if scheduler is not None:
            scheduler.step()
        found.append(total)
    return found, dict(model.named_parameters())
