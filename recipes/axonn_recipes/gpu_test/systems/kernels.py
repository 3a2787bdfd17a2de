"""SAMO's Triton kernels: beside the same step by torch's tiles, and as a share of what a copy moves."""

from __future__ import annotations

import copy
import os
from functools import partial

import torch
from torch import nn

import samo
from axonn_recipes.bench.numbers import spread
from axonn_recipes.bench_samo.measure import DENSE, OURS, TILES, steps
from axonn_recipes.bench_samo.settings import Settings
from axonn_recipes.gpu_test.scale import ROUNDED, STEPS, Check, Figure, Found, Scale, Side, apart
from axonn_recipes.gpu_test.training import WEIGHT_DECAY

_ROWS, _COLUMNS = 67, 1013  # more than a block of 65,536 elements, and odd


def run(scale: Scale) -> Found:
    """Weights after some steps, of each type; then times, each rank for itself, of which this rank's are reported."""
    if scale.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    found = Found(checks=[_compared(scale, dtype) for dtype in (torch.float32, torch.bfloat16)])
    if scale.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "0"  # which no time is worth knowing of
    settings = Settings(
        parameters=scale.parameters,
        device=scale.device,
        copy_bytes=scale.copied,
        hidden=2048 if scale.device == "cuda" else 64,
        dtype="bf16",
        rounds=scale.rounds,
    )
    sides, copying = steps(settings)
    rate = copying.bytes / spread(copying.seconds)["median"]  # type: ignore[operator]
    found.figures.append(Figure("copy", rate / 1e9, "GB/s"))
    for side in sides:
        found.sides.append(Side(side.name, side.name in (OURS, TILES), side.seconds))
        share = side.bytes / spread(side.seconds)["median"] / rate if side.bytes else None
        found.figures.append(Figure(f"copy bandwidth that {side.name} reaches", share, "%"))
    assert {OURS, DENSE} <= {side.name for side in sides}
    return found


def _compared(scale: Scale, dtype: torch.dtype) -> Check:
    """Weights of a pruned layer beside torch's own AdamW on dense float32 weights and masked gradients, in this very order of steps."""
    torch.manual_seed(1)
    model = nn.Linear(_COLUMNS, _ROWS).to(scale.place, dtype)
    masks = {"weight": torch.rand(_ROWS, _COLUMNS, generator=torch.Generator().manual_seed(2)).to(scale.place) < 0.3}
    whole = copy.deepcopy(model).float()
    factory = partial(torch.optim.AdamW, lr=1e-2, weight_decay=WEIGHT_DECAY)
    optimizer, reference = samo.Optimizer(factory, model, masks), factory(whole.parameters())
    with torch.no_grad():
        whole.weight.mul_(masks["weight"])
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 + step)
        for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            gradient = torch.randn(mine.shape, generator=generator).to(scale.place, dtype)
            mine.backward(gradient)
            theirs.grad = gradient.float() * (masks["weight"] if mine.dim() > 1 else 1)
        optimizer.step()
        reference.step()
    rounding = {torch.float32: ROUNDED, torch.bfloat16: 2**-7}[dtype]
    worst = max(
        apart(mine.detach().float(), theirs.detach())
        for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True)
    )
    return Check(f"adam and compress, {str(dtype).removeprefix('torch.')}", worst, rounding)
