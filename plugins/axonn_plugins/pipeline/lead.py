"""One order of passes for ranks of a stage that meet in collectives inside a pass: their messages may arrive in other orders.

Those are a tensor group, or all replicas where a layer has collectives of its own. The first of them takes what Algorithm 2 takes,
says so, and the others compute the same as soon as their own message is there; it will be, for their neighbours follow, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from axonn_plugins.pipeline.schedule import Action, Pass, Stage

_PASSES: tuple[Pass, ...] = ("forward", "backward")


class Lead:
    """The order of one rank's passes.

    Args:
        groups: global ranks of every group that computes a stage together; the same on all ranks, which make groups here. The
            first rank of each leads.
        timeout: seconds that it may take the first to know.
    """

    def __init__(self, groups: Sequence[Sequence[int]], timeout: float) -> None:
        for ranks in groups:
            # On the CPU: an accelerator would have to be waited for.
            made = dist.new_group(list(ranks), backend="gloo", timeout=timedelta(seconds=timeout))
            if dist.get_rank() in ranks:
                self._group, self._leads = made, dist.get_rank() == ranks[0]
        self._told: Pass | None = None

    def next(self, stage: Stage) -> Action | None:
        """The next action, taken as done; None: wait for a message, or `finished`."""
        if stage.in_fixed_order:
            return stage.next()
        if self._leads:
            action = stage.next()
            if action is not None:
                self._tell(action.kind)
            return action
        if self._told is None and not stage.finished:
            self._told = self._tell(None)
        if self._told is None or not stage.may(self._told):
            return None
        kind, self._told = self._told, None
        return stage.take(kind)

    def _tell(self, kind: Pass | None) -> Pass:
        number = torch.tensor([0 if kind is None else _PASSES.index(kind)], dtype=torch.uint8)
        dist.broadcast(number, group=self._group, group_src=0)
        return _PASSES[int(number)]
