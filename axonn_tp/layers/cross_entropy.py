"""Cross-entropy over classes that are split among ranks; no rank ever holds a whole row of logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from axonn_tp.comm.collectives import Collective, all_reduce
from axonn_tp.context.sums import over_sequence, real_targets
from axonn_tp.grid.layout import become
from axonn_tp.grid.mesh import Grid, Mesh
from axonn_tp.grid.share import Share, share_of
from axonn_tp.layers.activation import plain, split_of


def check_loss(module: nn.CrossEntropyLoss, head_sizes: set[int], name: str) -> None:
    """Refuse a smoothed loss whose number of classes cannot be known.

    Args:
        module: the loss.
        head_sizes: output features of the model's head layers.
        name: of the layer, for the message.

    Raises:
        ValueError: names the layer and the reason.
    """
    if module.label_smoothing and module.weight is None and len(head_sizes) > 1:
        raise ValueError(
            f"layer {name}: label_smoothing = {module.label_smoothing} needs the number of classes, but the head layers have "
            f"{' and '.join(map(str, sorted(head_sizes)))}; give the loss class weights or name it replicated in the plan"
        )


def loss_collectives(
    tokens: int, grid: Grid, axes: tuple[str, ...] = ("x",), label_smoothing: float = 0.0
) -> list[Collective]:
    """The collectives of one forward pass on one rank; the backward pass has none.

    Args:
        tokens: rows of logits on this rank.
        grid: the grid.
        axes: see `CrossEntropyLoss.convert`.
        label_smoothing: that of the loss; it sums one number more for each row.
    """
    share = share_of(grid, grid.coordinates(0), axes)
    if share.count == 1:
        return []
    sums = 3 if label_smoothing else 2
    return [Collective("all_reduce", share.group, share.count, rows * tokens) for rows in (1, sums)]


class _SplitCrossEntropy(torch.autograd.Function):
    """Logits (…, width) and targets (…) → w_t·(1−ε)·(−log p_t) + ε/C·Σ_c w_c·(−log p_c), torch's definition."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, weight: Tensor, smoothing: float, mesh: Mesh, share: Share
    ) -> Tensor:
        classes, width = len(weight), logits.shape[-1]
        first = width * share.index
        wide = logits if logits.dtype == torch.float64 else logits.float()
        top = all_reduce(wide.max(dim=-1).values, mesh, share.group, "max")
        shifted = wide - top[..., None]
        local = targets - first
        elsewhere = (local < 0) | (local >= width)
        local = local.masked_fill(elsewhere, 0)[..., None]
        sums = [shifted.exp().sum(-1), shifted.gather(-1, local).squeeze(-1).masked_fill(elsewhere, 0)]
        mine = weight[first : first + width]
        if smoothing:
            # Columns beyond the classes are padding: −∞, and no part of the sum.
            sums.append((shifted[..., : len(mine)] * mine).sum(-1))
        total, target, *weighted = all_reduce(torch.stack(sums), mesh, share.group)
        log_total, of_target = total.log(), weight[targets]
        losses = (1 - smoothing) * of_target * (log_total - target)
        if smoothing:
            losses = losses + smoothing / classes * (weight.sum() * log_total - weighted[0])
        probabilities = shifted.sub_(log_total[..., None]).exp_()
        ctx.save_for_backward(probabilities, local, elsewhere, of_target, mine)
        ctx.all_weights, ctx.smoothing, ctx.classes, ctx.dtype = weight.sum(), smoothing, classes, logits.dtype
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, local, elsewhere, of_target, mine = ctx.saved_tensors
        hard = (1 - ctx.smoothing) * of_target
        soft = ctx.smoothing / ctx.classes
        hit = hard.masked_fill(elsewhere, 0)[..., None]
        result = (probabilities * (hard + soft * ctx.all_weights)[..., None]).scatter_add_(-1, local, -hit)
        if soft:
            result[..., : len(mine)] -= soft * mine
        return result.mul_(grad[..., None]).to(ctx.dtype), None, None, None, None, None


def split_cross_entropy(
    logits: Tensor, targets: Tensor, mesh: Mesh, axes: tuple[str, ...] = ("x",), smoothing: float = 0.0
) -> Tensor:
    """The loss of every row, in float32 at least: logits (…, classes/g) and targets (…) → (…).

    Args:
        logits: this rank's share of the classes.
        targets: class numbers, all of them in range.
        mesh: the mesh.
        axes: see `CrossEntropyLoss.convert`.
        smoothing: label smoothing.
    """
    share = share_of(mesh.grid, mesh.coordinates, axes)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if share.count == 1:
        wide = logits.to(dtype).movedim(-1, 1)
        return F.cross_entropy(wide, targets, reduction="none", label_smoothing=smoothing)
    weight = logits.new_ones(logits.shape[-1] * share.count, dtype=dtype)
    return _SplitCrossEntropy.apply(logits, targets, weight, smoothing, mesh, share)


def rows(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    classes: int | None,
    smoothing: float,
    ignored: int,
    mesh: Mesh,
    axes: tuple[str, ...],
) -> tuple[Tensor, Tensor]:
    """Every row's loss, and the weight that its target has in a mean; zeros where a target is `ignored`.

    Args:
        input: this rank's share of the classes, as `CrossEntropyLoss` takes it.
        target: class numbers.
        weight: of all classes; ones when None.
        classes: see `CrossEntropyLoss.convert`.
        smoothing: label smoothing.
        ignored: number of targets that do not count.
        mesh: the mesh.
        axes: see `CrossEntropyLoss.convert`.

    Raises:
        ValueError: soft targets, or shapes that do not belong together.
    """
    share = share_of(mesh.grid, mesh.coordinates, axes)
    dim = min(1, input.dim() - 1)
    _check(input, target, dim)
    classes = len(weight) if weight is not None else classes or input.shape[dim] * share.count
    dtype = torch.promote_types(input.dtype, torch.float32)
    weight = input.new_ones(classes, dtype=dtype) if weight is None else weight.to(dtype)
    counted = target != ignored
    named = target.masked_fill(~counted, 0)
    in_range = ((named >= 0) & (named < classes)).all()
    torch._assert_async(in_range, f"a target is not one of the {classes} classes; correct it or set ignore_index")
    losses = _SplitCrossEntropy.apply(input.movedim(dim, -1), named, weight, smoothing, mesh, share)
    return losses.masked_fill(~counted, 0), weight[named].masked_fill(~counted, 0)


def _check(input: Tensor, target: Tensor, dim: int) -> None:
    if target.is_floating_point():
        raise ValueError(
            f"split cross-entropy takes class numbers as targets, not {target.dtype} probabilities; "
            "give class numbers or name the loss replicated in the plan"
        )
    if input.shape[:dim] + input.shape[dim + 1 :] != target.shape:
        raise ValueError(
            f"split cross-entropy: logits {tuple(input.shape)} hold classes in dim {dim}, so targets must have the "
            f"other dims, not {tuple(target.shape)}; reshape the targets"
        )


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`nn.CrossEntropyLoss` over a mesh: this rank's share of the classes in, the serial loss out on every rank.

    Takes logits (rows, classes/g), (classes/g) or (rows, classes/g, …) and targets of the same shape without classes; of logits
    that are whole, as of another classifier than the plan's head, the loss is torch's.
    Classes are split over `axes`; what the axes do not divide is padded at the end, and the padding's logits are −∞.
    The loss is computed in float32 at least, and is that of this rank's rows.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    classes: int | None

    @classmethod
    def convert(
        cls, module: nn.CrossEntropyLoss, mesh: Mesh, axes: tuple[str, ...] = ("x",), classes: int | None = None
    ) -> None:
        """Turn an `nn.CrossEntropyLoss` into this class, in place.

        Args:
            module: any `nn.CrossEntropyLoss`; its class weights stay whole.
            mesh: the mesh.
            axes: classes are split over these, each within the share of the one before.
            classes: number of classes without padding, for label smoothing; all columns when None.
        """
        become(module, cls, nn.CrossEntropyLoss)
        assert isinstance(module, cls)
        module.mesh, module.axes, module.classes = mesh, axes, classes

    def takes(self, input: Tensor, shares: int) -> bool:
        """True if logits may be one of so many shares of the classes, by their number; they are whole otherwise."""
        together = input.shape[min(1, input.dim() - 1)] * shares
        return self.classes is None or self.classes <= together < self.classes + self.mesh.size("model")

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Loss of this rank's rows, reduced as `self.reduction` says; targets equal to `ignore_index` do not count.

        Raises:
            ValueError: soft targets, or shapes that do not belong together.
        """
        share = share_of(self.mesh.grid, self.mesh.coordinates, self.axes)
        if share.count == 1 or (split_of(input) is None and not self.takes(input, share.count)):
            return super().forward(input, target)
        input = plain(input)
        target = real_targets(target, self.ignore_index)
        losses, weights = rows(
            input, target, self.weight, self.classes, self.label_smoothing, self.ignore_index, self.mesh, self.axes
        )
        if self.reduction == "none":
            return losses
        if self.reduction == "sum":
            return over_sequence(losses.sum())
        total, count = over_sequence(torch.stack([losses.sum(), weights.sum()])).unbind()
        return total / count
