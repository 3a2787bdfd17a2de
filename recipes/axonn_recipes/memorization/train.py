"""One model with one loss and one seed: train on the pages, and see what it writes by itself."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from axonn_plugins import processors
from axonn_plugins.hosts.plain import Run, compose
from axonn_recipes.memorization.models import Model
from axonn_recipes.memorization.pages import Pages, order
from axonn_recipes.memorization.settings import SUFFIX, Settings, device
from axonn_tp import as_serial

_CLIP, _BETAS = 1.0, (0.9, 0.95)


def train(model: Model, pages: Pages, settings: Settings, loss: str, seed: int) -> dict[str, Any]:
    """Train on one rank, in a process of its own.

    Args:
        model: what is trained.
        pages: to learn from.
        settings: how.
        loss: standard or goldfish.
        seed: of weights, buckets and order.

    Returns:
        By bucket, the share of pages whose last `SUFFIX` tokens are written without a mistake ("exact"), and of those tokens, each
        after the right ones, that are ("accuracy"); the loss of what is held out after the warm-up and at the end ("held_out");
        "parameters" and "seconds". The same on all ranks.
    """
    # Collectives are called by names that newer torch wants changed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    processors.share_among(settings.shape.world)
    kind = device(settings.shape)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    torch.manual_seed(seed)
    serial, began = model.build(), time.perf_counter()
    parameters = sum(p.numel() for p in serial.parameters())

    def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=settings.lr, betas=_BETAS, weight_decay=0.0, fused=True)

    run = compose(serial, adamw, settings.block(loss, model.labels, model.plan), stage=1, max_norm=_CLIP)
    found = order(settings, len(pages.learned), seed)
    held_out = []
    quiet = True if dist.get_rank() else None  # None: shown on a terminal only
    steps = tqdm(found.batches, unit="step", disable=quiet, leave=False, file=sys.stderr, desc=f"{model.name} {loss}")
    for number, batch in enumerate(steps, 1):
        _step(model, run, pages.learned[batch], settings, number)
        if number == settings.warmup:
            held_out.append(_seen(model, run, pages.held_out, settings)[1])
    held_out.append(_seen(model, run, pages.held_out, settings)[1])
    right = {name: _seen(model, run, pages.learned[index], settings)[0] for name, index in found.buckets.items()}
    return {
        "exact": {name: one.all(1).double().mean().item() for name, one in right.items()},
        "accuracy": {name: one.double().mean().item() for name, one in right.items()},
        "held_out": held_out,
        "parameters": parameters,
        "seconds": time.perf_counter() - began,
    }


def _step(model: Model, run: Run, rows: Tensor, settings: Settings, number: int) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = settings.lr_at(number)
    parts = run.mesh.shard_batch(rows).to(run.mesh.device).split(settings.micro_batch)
    for left, part in zip(reversed(range(len(parts))), parts, strict=True):
        with run.no_sync() if left else nullcontext():
            run.backward(model.loss(run.model, part) / len(parts))
    run.step()


@torch.no_grad()
def _seen(model: Model, run: Run, rows: Tensor, settings: Settings) -> tuple[Tensor, float]:
    """Which of the last tokens of pages are the likeliest after those before them, (rows, SUFFIX), and the mean loss of all tokens.

    Written by itself, a suffix is right exactly where every token is the likeliest after the right ones.
    """
    right = torch.zeros(len(rows), SUFFIX, dtype=torch.int32, device=run.mesh.device)
    losses = torch.zeros(len(rows), dtype=torch.float64, device=run.mesh.device)
    run.model.eval()
    with as_serial(run.model, run.mesh):
        for index in _turns(len(rows), settings):
            part = rows[index].to(run.mesh.device)
            logits, targets = model.logits(run.model, part).float(), part[:, 1:]
            right[index] = (logits.argmax(-1) == targets)[:, -SUFFIX:].int()
            losses[index] = (
                F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
                .view_as(targets)
                .mean(1)
                .double()
            )
    run.model.train()
    for found in (right, losses):  # nothing is below the zeros of ranks that have not looked
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return right.bool().cpu(), losses.mean().item()


def _turns(rows: int, settings: Settings) -> Iterator[Tensor]:
    """This rank's pages, a few at a time; as often on every rank, for weights are gathered each time."""
    each, ranks = settings.micro_batch, dist.get_world_size()
    for begin in range(dist.get_rank() * each, -(-rows // (each * ranks)) * each * ranks, each * ranks):
        yield torch.arange(begin, begin + each).clamp(max=rows - 1)
