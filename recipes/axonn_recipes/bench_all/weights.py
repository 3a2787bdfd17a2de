"""First weights and masks by the name of a parameter of the serial model, the same for every side."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from axonn_recipes.bench_all.settings import Settings

_STD = 0.02


def drawn(settings: Settings, name: str, shape: tuple[int, ...]) -> Tensor:
    """A parameter: normal, its smallest elements zero where the model is pruned.

    Args:
        settings: of the run.
        name: of the serial model's parameter, such as blocks.0.attention.q.
        shape: its.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{settings.seed} {name}".encode()))
    values = _STD * torch.randn(shape, generator=generator)
    gone = int(settings.sparsity * values.numel())
    if gone and (".attention." in name or ".experts." in name):
        values[values.abs() <= values.abs().flatten().kthvalue(gone).values] = 0
    return values


def keep_zeros(parameter: torch.nn.Parameter) -> None:
    """Let a matrix's zeros stay zero under an optimizer that knows of no masks: AdamW moves nothing whose gradient is zero."""
    mask = parameter.detach().ne(0)
    if parameter.dim() > 1 and not mask.all():
        parameter.register_hook(lambda gradient: gradient * mask)
