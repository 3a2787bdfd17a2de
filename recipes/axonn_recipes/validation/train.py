"""Train a problem, serially or on the grid, and keep every loss."""

from __future__ import annotations

import math
import os
import sys
import time
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import axonn_tp
from axonn_plugins import processors
from axonn_recipes.validation.problems import Problem
from axonn_recipes.validation.settings import Settings
from axonn_tp import Mesh

CLIP, WEIGHT_DECAY = 1.0, 0.1


Role = Literal["serial", "control", "parallel"]


def curve(problem: Problem, dtype: torch.dtype, settings: Settings, role: Role) -> tuple[list[float], list[float]]:
    """The whole batch's loss at every step, and the seconds of each; each rank calls it in a process of its own.

    Args:
        problem: what to train.
        dtype: of weights, activations and optimizer.
        settings: the run.
        role: parallel is on the grid with everything on, others in plain PyTorch; the control's first weights are each
            one unit in the last place larger or smaller.
    """
    parallel = role == "parallel"
    if parallel:
        processors.share_among(settings.grid.world)
    if settings.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.backends.cudnn.allow_tf32 = False  # or convolutions in float32 would not be
    torch.manual_seed(settings.seed)
    model = problem.build().to(settings.device, dtype)
    if role == "control":
        _nudge(model)
    mesh = _parallelized(model, problem, settings) if parallel else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=problem.lr, weight_decay=WEIGHT_DECAY, foreach=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_share_of_lr, settings.steps))
    quiet = True if mesh is not None and dist.get_rank() else None  # None: shown on a terminal only
    losses, seconds = [], []
    for step in tqdm(range(1, settings.steps + 1), unit="step", disable=quiet, leave=False, file=sys.stderr):
        began = time.perf_counter()
        batch = [t.to(settings.device, dtype if t.is_floating_point() else None) for t in problem.batch(step)]
        losses.append(_step(model, batch, optimizer, mesh))
        scheduler.step()
        seconds.append(time.perf_counter() - began)
    return losses, seconds


@torch.no_grad()
def _nudge(model: nn.Module) -> None:
    for weights in model.parameters():
        weights.copy_(torch.nextafter(weights, torch.randn_like(weights)))


def _parallelized(model: nn.Module, problem: Problem, settings: Settings) -> Mesh:
    dist.init_process_group("nccl" if settings.device == "cuda" else "gloo")
    mesh = Mesh(settings.grid, settings.device)
    for module in problem.checkpointed(model):
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]
    axonn_tp.parallelize(model, mesh, problem.plan, settings.options)
    return mesh


def _step(model: nn.Module, batch: list[torch.Tensor], optimizer: torch.optim.Optimizer, mesh: Mesh | None) -> float:
    optimizer.zero_grad()
    loss = model(*(batch if mesh is None else map(mesh.shard_batch, batch)))
    loss.backward()
    value = loss.detach().double()
    if mesh is None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    else:
        axonn_tp.sync_gradients(model.parameters(), mesh)
        axonn_tp.clip_grad_norm_(model.parameters(), mesh, CLIP)
        dist.all_reduce(value, group=mesh.group("batch"))
        value /= mesh.grid.batch
    optimizer.step()
    return value.item()


def _share_of_lr(steps: int, done: int) -> float:
    """Learning rate after `done` steps as a share of the highest: linear warm-up over a tenth, then a cosine to a tenth."""
    warm = max(steps // 10, 1)
    if done < warm:
        return (done + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (done - warm) / max(steps - warm, 1)))
