"""Gradient sums of a model with experts, for plain PyTorch loops."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from ted_moe.topology import Groups


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
    pending = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        axis = "data" if getattr(parameter, "allreduce", True) else "expert_data"
        parameter.grad /= groups.size("data")
        if groups.size(axis) > 1:
            pending.append(dist.all_reduce(parameter.grad, group=groups.group(axis), async_op=True))
    for work in pending:
        work.wait()
