"""Megatron's Muon on a grid: momentum stays in shares, of which each update is gathered, orthogonalised whole and cut again.

Megatron's own splits over tensor ranks give each rank's share by itself by default (``--muon-tp-mode blockwise``), another update on every
number of ranks; here it is that of one rank, as with ``duplicated``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.originals import Originals

_MODULES = ("muon", "emerging_optimizers")
"""Modules of `megatron.core.optimizer` with Muon: of 0.16 and 0.17, and of later versions."""


def install(originals: Originals) -> None:
    """Have optimizers that are made from now on see whole matrices; nothing where Megatron has no Muon."""
    for name in _MODULES:
        try:
            module = importlib.import_module(f"megatron.core.optimizer.{name}")
        except ImportError:
            continue
        kind = getattr(module, "TensorParallelMuon", None)
        if kind is None:
            continue
        originals.wrap(kind, "__init__", _of_whole_matrices)
        originals.wrap(kind, "orthogonalize", _whole)
        originals.wrap(Float16OptimizerWithFloat16Params, "__init__", _with_layouts)
        if hasattr(module, "_get_param_groups"):
            originals.wrap(module, "_get_param_groups", _to_be_parted)
        return


def _of_whole_matrices(original: Callable[..., None]) -> Callable[..., None]:
    mode = "mode" if "mode" in inspect.signature(original).parameters else "tp_mode"

    @wraps(original)
    def init(self: Any, *args: Any, **named: Any) -> None:
        if named.get(mode) == "distributed":
            raise ValueError(
                "muon_tp_mode = 'distributed': on a grid every rank orthogonalises whole matrices, and none a part; use 'duplicated'"
            )
        # What it is given is orthogonalised as it is, and that is whole.
        original(self, *args, **{**named, mode: "blockwise"})

    return init


def _with_layouts(original: Callable[..., None]) -> Callable[..., None]:
    """Muon is given float32 copies of weights of 16 bits, to which Megatron copies its own marks alone."""

    @wraps(original)
    def init(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        for halves, copies in zip(
            getattr(self, "float16_groups", ()), getattr(self, "fp32_from_float16_groups", ()), strict=True
        ):
            for half, copy in zip(halves, copies, strict=True):
                if hasattr(half, "axonn_layout"):
                    copy.axonn_layout = half.axonn_layout

    return init


def _whole(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def orthogonalize(self: Any, p: Tensor, grad: Tensor, **named: Any) -> Tensor:
        layout, mesh = getattr(p, "axonn_layout", None), process_groups.mesh()
        group = process_groups.sharers()
        if layout is None or group is None or not layout.axes:
            return original(self, p, grad, **named)
        shares = [torch.empty_like(grad).reshape(-1) for _ in range(group.size())]
        dist.all_gather(shares, grad.contiguous().view(-1), group)
        if not layout.over_z or mesh.grid.gz == 1:
            shares = [share.view(layout.block_shape(mesh.grid)) for share in shares]
        whole = layout.assemble(shares, mesh.grid)
        made = original(self, p, whole, **named)
        return layout.shard(made, mesh.grid, mesh.coordinates).view_as(grad)

    return orthogonalize


class _Groups(list):
    """Parameter groups, of which some are taken out while one goes through them."""

    def __iter__(self) -> Any:
        return iter(self[:])

    def remove(self, group: Any) -> None:
        """Remove that group, not an equal one: tensors are not compared."""
        self[:] = [one for one in self if one is not group]


def _to_be_parted(original: Callable[..., list]) -> Callable[..., list]:
    """Megatron parts those whose gradients are summed elsewhere, which with z may be all, and an optimizer of none is an error."""

    @wraps(original)
    def groups(*args: Any, **named: Any) -> list:
        found = _Groups(original(*args, **named))
        if found and all(group["is_expert_parallel"] for group in found):
            found.append({**found[0], "params": [], "is_expert_parallel": False})
        return found

    return groups
