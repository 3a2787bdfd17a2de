"""From the shards of all ranks to the serial model's state, one parameter at a time."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_tp.layout import layout_of
from axonn_tp.mesh import Mesh


@torch.no_grad()
def full_state_dict(model: nn.Module, mesh: Mesh, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The serial model's state_dict on the CPU of rank 0; every rank calls it.

    Args:
        model: a model that `parallelize` split.
        mesh: its mesh.
        dtype: of the floating-point tensors; theirs when None.

    Returns:
        Whole tensors by the serial model's names on rank 0, nothing on the others.
    """
    first = dist.get_rank() == 0
    full: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        layout = layout_of(value)
        whole = value.detach()
        if layout.axes:
            shards = [torch.empty_like(whole) for _ in range(mesh.grid.world)]
            dist.all_gather(shards, whole.contiguous())
            whole = layout.assemble(shards, mesh.grid) if first else whole
        if first:
            whole = whole.to(dtype) if dtype is not None and whole.is_floating_point() else whole
            full[name] = whole.cpu().clone()
    return full
