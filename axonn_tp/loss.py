"""Cross-entropy over a vocabulary that is split over x; no rank ever holds a whole row of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from axonn_tp.collectives import Collective, all_reduce
from axonn_tp.layout import become
from axonn_tp.mesh import Grid, Mesh


def check_loss(module: nn.CrossEntropyLoss, name: str) -> None:
    """Refuse options that are not there yet.

    Raises:
        ValueError: names the layer and the option.
    """
    for option, plain in (("weight", None), ("label_smoothing", 0.0)):
        if getattr(module, option) != plain:
            raise ValueError(
                f"layer {name}: {option} is not supported over a split vocabulary; leave it out or name the layer replicated in the plan"
            )


def loss_collectives(tokens: int, grid: Grid) -> list[Collective]:
    """The collectives of one forward pass on one rank; the backward pass has none."""
    if grid.gx == 1:
        return []
    return [Collective("all_reduce", "x", grid.gx, tokens), Collective("all_reduce", "x", grid.gx, 2 * tokens)]


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, mesh: Mesh) -> Tensor:
        width = logits.shape[-1]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        top = all_reduce(wide.max(dim=-1).values, mesh, "x", "max")
        shifted = wide - top[..., None]
        exponentials = shifted.exp()
        local = targets - width * mesh.rank("x")
        elsewhere = (local < 0) | (local >= width)
        local = local.masked_fill(elsewhere, 0)[..., None]
        target = shifted.gather(-1, local).squeeze(-1).masked_fill(elsewhere, 0)
        total, target = all_reduce(torch.stack([exponentials.sum(-1), target]), mesh, "x")
        ctx.save_for_backward(exponentials.div_(total[..., None]), local, elsewhere)
        ctx.dtype = logits.dtype
        return total.log() - target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        probabilities, local, elsewhere = ctx.saved_tensors
        hit = (~elsewhere).to(probabilities.dtype)[..., None]
        result = probabilities.scatter_add(-1, local, -hit) * grad[..., None]
        return result.to(ctx.dtype), None, None


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`nn.CrossEntropyLoss` over a mesh: logits (rows, vocabulary/gx) and targets (rows) → the serial loss on every rank of x.

    Logits of padding are −∞. The loss is computed in float32 at least, and is that of this rank's rows.
    """

    mesh: Mesh

    @classmethod
    def convert(cls, module: nn.CrossEntropyLoss, mesh: Mesh) -> None:
        """Turn an `nn.CrossEntropyLoss` into this class, in place."""
        become(module, cls, nn.CrossEntropyLoss)
        assert isinstance(module, cls)
        module.mesh = mesh

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Loss of this rank's rows, reduced as `self.reduction` says; rows with `ignore_index` do not count."""
        if self.mesh.size("x") == 1:
            return super().forward(input, target)
        if input.dim() != 2 or target.dim() != 1:
            raise ValueError(
                f"split cross-entropy takes logits (rows, classes) and targets (rows), not {tuple(input.shape)} and {tuple(target.shape)}"
            )
        losses = _SplitCrossEntropy.apply(input, target, self.mesh)
        counted = target != self.ignore_index
        losses = losses.masked_fill(~counted, 0)
        if self.reduction == "none":
            return losses
        return losses.sum() if self.reduction == "sum" else losses.sum() / counted.sum()
