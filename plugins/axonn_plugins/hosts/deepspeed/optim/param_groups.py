"""Parameter groups in which what is summed over other groups stands apart, as DeepSpeed wants its experts."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch

from axonn_tp.checkpoint.optimizer import PER_GROUP_LISTS


def _apart(parameter: Any) -> bool:
    return getattr(parameter, "allreduce", True) is False


def split_groups(parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Groups with the members of each group that are summed elsewhere in groups of their own behind all others, same settings.

    Args:
        parameters: parameters, or an optimizer's groups; marked by `AxonnEngine`.
    """
    given = list(parameters)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    dense, apart = [], []
    for source, group in enumerate(groups):
        members: list[Any] = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        names = {p.group_name for p in members if _apart(p)}
        group["params"] = [p for p in members if not _apart(p)]
        group["moe"] = False
        group["axonn_source"] = source
        dense.append(group)
        for name in sorted(names):
            apart.append(
                {
                    **group,
                    "params": [p for p in members if _apart(p) and p.group_name == name],
                    "moe": True,
                    "name": name,
                }
            )
    return [group for group in dense + apart if group["params"]]


def schedulers_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Torch's schedulers that were made for an optimizer, also those that nobody handed over: a script may step one itself."""
    kinds = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    return [
        found
        for found in gc.get_objects()
        if issubclass(type(found), kinds) and getattr(found, "optimizer", None) is optimizer
    ]


def extend_scheduler(scheduler: Any, groups: list[dict[str, Any]], before: int) -> None:
    """Give a scheduler that was made for `before` groups one entry for each group that `split_groups` made of them."""
    if not isinstance(scheduler, (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)):
        return
    for name in PER_GROUP_LISTS:
        entries = getattr(scheduler, name, None)
        if isinstance(entries, list) and len(entries) == before:
            setattr(scheduler, name, [entries[group["axonn_source"]] for group in groups])
