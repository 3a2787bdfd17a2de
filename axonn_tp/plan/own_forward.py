"""Layers of a class of a script's own that computes something else than torch's, in whose place ours would put torch's."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.conv import _ConvNd

from axonn_tp.grid.mesh import Grid
from axonn_tp.layers.batch_norm import PLAIN, SyncBatchNorm

_TORCH = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.CrossEntropyLoss, _ConvNd)


def refuse_own_forward(module: nn.Module, name: str) -> None:
    """Refuse a layer with a forward of its own, but for a LayerNorm that computes what torch's does, as those that cast do.

    Raises:
        ValueError: names it.
    """
    if not (isinstance(module, _TORCH) and _is_own(module)):
        return
    if not (isinstance(module, nn.LayerNorm) and _normalises(module)):
        raise ValueError(
            f"layer {name}: {type(module).__name__} has a forward of its own, which a split layer would not run; name it replicated in the plan, or "
            "leave it out"
        )


def refuse_own_statistics(model: nn.Module, grid: Grid, every: bool) -> None:
    """Refuse BatchNorms with a forward of their own, as those that hold an activation, where they are to take the statistics of all ranks.

    Raises:
        ValueError: names the first.
    """
    kinds: tuple[type[nn.Module], ...] = (*PLAIN, nn.SyncBatchNorm) if every else (nn.SyncBatchNorm,)
    for name, module in model.named_modules() if grid.batch > 1 else ():
        group = getattr(module, "process_group", None)
        if isinstance(module, kinds) and group is None and not isinstance(module, SyncBatchNorm) and _is_own(module):
            raise ValueError(
                f"layer {name}: {type(module).__name__} has a forward of its own, which the statistics of the samples of {grid.batch} ranks would replace; "
                "use torch's BatchNorm and a module behind it, or leave sync_batch_norm out"
            )


def _is_own(module: nn.Module) -> bool:
    return not type(module).forward.__module__.startswith("torch.nn.modules.")


@torch.no_grad()
def _normalises(module: nn.LayerNorm) -> bool:
    probe, generator = copy.deepcopy(module).to_empty(device="cpu").float(), torch.Generator().manual_seed(0)
    for parameter in probe.parameters():
        parameter.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float32) + 0.5)
    rows = torch.rand(2, *module.normalized_shape, generator=generator, dtype=torch.float32)
    expected = F.layer_norm(rows, module.normalized_shape, probe.weight, probe.bias, module.eps)
    try:
        got = probe(rows)
    except Exception:
        return False  # it takes something else
    return got.shape == expected.shape and torch.allclose(got.float(), expected, rtol=1e-4, atol=1e-5)
