"""Gradient sums of a model with experts, for plain PyTorch loops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ted_moe.topology import Groups

_BUCKET = 2**25  # bytes: few messages, and little memory for what is copied into them


@torch.no_grad()
def sync_gradients(parameters: Iterable[nn.Parameter], groups: Groups) -> None:
    """Average gradients over the ranks that read other tokens.

    Dense parameters are summed over data; an expert's over expert data, because the tokens of the ranks of its expert
    group have come to it already. Both are divided by the size of data, so that the mean of the ranks' mean losses is
    what was differentiated.

    Args:
        parameters: of the model, the same in the same order on every rank; experts' have ``allreduce = False``.
        groups: the process groups.
    """
    alike: dict[tuple[str, torch.dtype], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        axis = "data" if getattr(parameter, "allreduce", True) else "expert_data"
        parameter.grad /= groups.size("data")
        if groups.size(axis) > 1:
            alike[axis, parameter.grad.dtype].append(parameter.grad)
    for (axis, _), gradients in alike.items():
        for bucket in _buckets(gradients):
            flat = _flatten_dense_tensors(bucket)
            dist.all_reduce(flat, group=groups.group(axis))
            for gradient, summed in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                gradient.copy_(summed)


def _buckets(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Cut a list where a bucket is full; a larger gradient has one of its own."""
    made: list[list[Tensor]] = [[]]
    room = _BUCKET
    for gradient in gradients:
        if gradient.nbytes > room and made[-1]:
            made.append([])
            room = _BUCKET
        made[-1].append(gradient)
        room -= gradient.nbytes
    return made
