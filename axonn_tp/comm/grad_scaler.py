"""torch's GradScaler for shards: what overflows on one rank is an overflow for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from axonn_tp.comm.collectives import all_reduce
from axonn_tp.grid.mesh import Mesh


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` over a mesh: all ranks skip the same steps and keep the same scale.

    A rank sees infinities in its own shards only, so whether any were found is reduced over the mesh each time gradients
    are unscaled, in `unscale_` or in `step`; every rank calls them. Call `sync_gradients` before.

    Args:
        mesh: the mesh.
        keywords: torch's arguments, without the device.
    """

    def __init__(self, mesh: Mesh, **keywords: Any) -> None:
        super().__init__(mesh.device.type, **keywords)
        self.mesh = mesh

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # Every way to a step, a fused optimizer's too, leads through here.
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return agreed(found or {found_inf.device: found_inf}, self.mesh)


def agreed(flags: Mapping[torch.device, Tensor], mesh: Mesh) -> dict[torch.device, Tensor]:
    """Flags of infinities that any rank of a mesh has found, by device; every rank calls it."""
    worst = torch.stack([flag.to(mesh.device) for flag in flags.values()]).amax()
    for axis in ("model", "batch"):
        worst = all_reduce(worst, mesh, axis, "max")
    return {device: worst.to(device) for device in flags}
