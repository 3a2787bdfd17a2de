"""Gradient sums of a model with experts, for plain PyTorch loops."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from axonn_tp.comm.gradients import sum_gradients
from ted_moe.topology import Groups


def sync_gradients(parameters: Iterable[nn.Parameter], groups: Groups) -> None:
    """Average gradients over the ranks that read other tokens.

    Dense parameters are summed over data; an expert's over expert data, because the tokens of the ranks of its expert
    group have come to it already. Both are divided by the size of data, so that the mean of the ranks' mean losses is
    what was differentiated.

    Args:
        parameters: of the model, the same in the same order on every rank; experts' have ``allreduce = False``.
        groups: the process groups.
    """
    sum_gradients(parameters, lambda parameter: (groups, _axis(parameter)), groups.size("data"))


def _axis(parameter: nn.Parameter) -> str:
    return "data" if getattr(parameter, "allreduce", True) else "expert_data"
