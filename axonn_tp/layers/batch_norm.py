"""BatchNorm whose statistics are those of the samples of all ranks, as in a run on one rank with the whole batch.

Ranks along z and data read different samples; torch's BatchNorm takes the statistics of each rank's own, under DDP as here.
`torch.nn.SyncBatchNorm`, whose statistics are of all ranks, counts tokens that ranks of x and y share once for each, and knows CUDA alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from axonn_tp.comm.collectives import copy_to, reduce_from
from axonn_tp.grid.layout import become
from axonn_tp.grid.mesh import Mesh
from axonn_tp.layers.activation import split_of

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SyncBatchNorm(_BatchNorm):
    """Mixed into `nn.BatchNorm1d`, `2d` or `3d`: mean and variance over the samples of all ranks of z and data, in training.

    Four small all-reduces a pass: of channels + 1 and channels numbers forward, and of their gradients.
    """

    mesh: Mesh

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (samples, channels, …) by the channels' statistics.

        Raises:
            ValueError: the input is a share of an activation, whose ranks of x and y hold other tokens or channels.
        """
        own = self.training or self.running_mean is None
        if not own or self.mesh.size("batch") == 1:
            return super().forward(input)
        self._check_input_dim(input)
        if split_of(input) is not None:
            raise ValueError(
                f"{type(self).__name__} reads an activation that is split over x or y, and would see a part of each sample; where tokens are split use "
                'layout = "replicated", or "whole_tokens" on the embedding; where features are, leave the embedding, or the pair around it, out of the plan'
            )
        wide = input if input.dtype == torch.float64 else input.float()
        shape = (1, -1, *(1 for _ in range(input.dim() - 2)))
        dims = [dim for dim in range(input.dim()) if dim != 1]
        here = wide.new_full((1,), input.numel() // input.shape[1])
        sums = self._summed(torch.cat([wide.sum(dims), here]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        deviation = wide - mean.view(shape)
        variance = self._summed(deviation.square().sum(dims)) / count
        self._track(mean.detach(), (variance.detach() * count / (count - 1)))
        output = deviation * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)

    def _summed(self, tensor: Tensor) -> Tensor:
        """Over the ranks; each rank's loss depends on the sum, so its gradient is summed, too."""
        return copy_to(reduce_from(tensor, self.mesh, "batch"), self.mesh, "batch")

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if not self.training or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class _Sync1d(SyncBatchNorm, nn.BatchNorm1d):
    pass


class _Sync2d(SyncBatchNorm, nn.BatchNorm2d):
    pass


class _Sync3d(SyncBatchNorm, nn.BatchNorm3d):
    pass


class _SyncAny(SyncBatchNorm):
    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


_SYNCHRONISED = dict(zip((*PLAIN, nn.SyncBatchNorm), (_Sync1d, _Sync2d, _Sync3d, _SyncAny), strict=True))


def synchronise(model: nn.Module, mesh: Mesh, every: bool) -> None:
    """Give BatchNorms of a model the statistics of all ranks' samples, in place.

    Args:
        model: subclasses of what is changed keep their other methods.
        mesh: over whose z and data axes samples lie.
        every: `nn.BatchNorm1d`, `2d` and `3d`, too, and not `nn.SyncBatchNorm` of all ranks alone.
    """
    for module in model.modules():
        plain = next((kind for kind in _SYNCHRONISED if isinstance(module, kind)), None)
        changes = getattr(module, "process_group", None) is None if plain is nn.SyncBatchNorm else every
        if plain is not None and changes and not isinstance(module, SyncBatchNorm):
            become(module, _SYNCHRONISED[plain], plain)
            module.mesh = mesh  # type: ignore[assignment]
