"""Gradient sums of a model with experts, for plain PyTorch loops: behind backward, or while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_tp.comm.clipping import measure_whole, owner_of, power, received_largest, sent_largest
from axonn_tp.comm.collectives import all_reduce
from axonn_tp.comm.gradients import sum_gradients_once
from axonn_tp.comm.reducer import BucketReducer, check_bytes
from ted_moe.topology import Groups


def sync_gradients(parameters: Iterable[nn.Parameter], groups: Groups) -> None:
    """Average gradients over the ranks that read other tokens.

    Dense parameters are summed over data; an expert's over expert data, because the tokens of the ranks of its expert
    group have come to it already. Both are divided by the size of data, so that the mean of the ranks' mean losses is
    what was differentiated. Behind it torch's `clip_grad_norm_` takes the norm of the whole model, with every rank's experts, and its
    `GradScaler` skips a step on all ranks where one has found an overflow.

    Args:
        parameters: of the model, the same in the same order on every rank; experts' have ``allreduce = False``.
        groups: the process groups.
    """
    parameters = list(parameters)
    sum_gradients_once(parameters, lambda parameter: (groups, _axis(parameter)), groups.size("data"))
    _of_whole_model(parameters, groups)


class GradientReducer(BucketReducer):
    """`sync_gradients` while backward runs, in buckets: ``loss.backward(); reducer.finish()``, as `axonn_tp.GradientReducer`.

    Sums go over groups of their own, so that they are under way beside all-to-alls of tokens.

    Args:
        parameters: see `sync_gradients`.
        groups: the process groups; every rank makes two more.
        bucket_bytes: see `axonn_tp.GradientReducer`.

    Attributes:
        groups: those of the sums.

    Raises:
        ValueError: `bucket_bytes` is less than 1.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], groups: Groups, bucket_bytes: int | None = None) -> None:
        check_bytes(bucket_bytes)
        self.groups = own = groups.apart(("data", "expert_data"))
        parameters = list(parameters)
        device = parameters[0].device if parameters else torch.device("cpu")
        if own.size("data") > 1:
            device = own.sender("data", device)
        super().__init__(parameters, lambda p: (own, _axis(p)), own.size("data"), device, bucket_bytes)

    def _complete(self, parameters: Sequence[nn.Parameter]) -> None:
        _of_whole_model(parameters, self.groups)


def _of_whole_model(parameters: Sequence[nn.Parameter], groups: Groups) -> None:
    if groups.size("block") > 1:
        measure_whole(parameters, groups, _whole_norm)
        _skip_together()


def _skip_together() -> None:
    """Have torch's GradScaler know what any rank has found: an expert's overflow is in its own ranks' gradients alone."""
    scaler: Any = torch.amp.GradScaler
    original = scaler._unscale_grads_
    if getattr(original, "axonn_experts", False):
        return

    @wraps(original)
    def unscale(self: Any, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, *rest: Any) -> Any:
        found = original(self, optimizer, inv_scale, found_inf, *rest)
        owners = (owner_of(parameter) for group in optimizer.param_groups for parameter in group["params"])
        groups = next((owner for owner in owners if isinstance(owner, Groups)), None)
        if groups is None:
            return found
        found = found or {found_inf.device: found_inf}
        device = groups.sender("block", found_inf.device)
        worst = all_reduce(torch.stack([flag.to(device) for flag in found.values()]).amax(), groups, "block", "max")
        return {kind: worst.to(kind) for kind in found}

    unscale.axonn_experts = True  # type: ignore[attr-defined]
    scaler._unscale_grads_ = unscale


@torch.no_grad()
def _whole_norm(tensors: list[Tensor], parameters: list[Any], groups: Groups, kind: float) -> Tensor:
    """The norm of the whole model's gradients, of which replicas count once, the same on every rank; see `axonn_tp.comm.clipping`."""
    device = parameters[0].device
    if kind == float("inf"):
        sent = sent_largest(tensors, device).to(groups.sender("block", device))
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=groups.group("block"))
        return received_largest(sent.to(device))
    powers = torch.zeros(2, 2, dtype=torch.float64, device=device)  # of dense layers and experts, whole and split
    for tensor, parameter in zip(tensors, parameters, strict=True):
        split = getattr(parameter, "ted_split", False) or getattr(parameter, "tensor_model_parallel", False)
        powers[int(_axis(parameter) != "data"), int(split)] += power(tensor, kind)
    dense, experts = powers
    for axis, part in (("tensor", powers[:, 1]), ("expert", experts)):
        if groups.size(axis) > 1:
            sent = part.to(groups.sender(axis, device)).contiguous()
            dist.all_reduce(sent, group=groups.group(axis))
            part.copy_(sent)
    return (dense.sum() + experts.sum()).pow(1 / kind)


def _axis(parameter: nn.Parameter) -> str:
    return "data" if getattr(parameter, "allreduce", True) else "expert_data"
