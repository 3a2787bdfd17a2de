"""Megatron's Muon on a grid: momentum stays in shares, of which each update is gathered, orthogonalised whole and cut again.

Megatron's own splits over tensor ranks give each rank's share by itself by default (``--muon-tp-mode blockwise``), another update on every
number of ranks; here it is that of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.originals import Originals


def install(originals: Originals) -> None:
    """Have optimizers that are made from now on see whole matrices; nothing where Megatron has no Muon."""
    try:
        from megatron.core.optimizer import muon
    except ImportError:
        return
    originals.wrap(muon.TensorParallelMuon, "__init__", _of_whole_matrices)
    originals.wrap(muon.TensorParallelMuon, "orthogonalize", _whole)
    originals.wrap(muon, "_get_param_groups", _to_be_parted)


def _of_whole_matrices(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def init(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **{**named, "mode": "blockwise"})

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
