"""One order of passes for ranks of a stage that meet in collectives inside a pass: their messages may arrive in other orders.

Those are a tensor group, or all replicas where a layer has collectives of its own. The first of them takes what Algorithm 2 takes,
says so, and the others compute the same as soon as their own message is there; it will be, for their neighbours follow, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from axonn_plugins.pipeline.schedule import Action, Pass, Stage

_PASSES: tuple[Pass, ...] = ("forward", "backward")
_NONE = len(_PASSES)
"""In the place of a pass's number: there will be no more."""


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
        self._led = self._over = False
        self._left: Any = None

    def next(self, stage: Stage) -> Action | None:
        """The next action, taken as done; None: wait for a message, or `finished`."""
        self._led = not stage.in_fixed_order
        if not self._led:
            return stage.next()
        if self._leads:
            action = stage.next()
            if action is not None:
                self._tell(_PASSES.index(action.kind))
            return action
        if self._told is None and not stage.finished and not self._over:
            number = self._tell(0)
            self._over = number == _NONE
            self._told = None if self._over else _PASSES[number]
        if self._told is None or not stage.may(self._told):
            return None
        kind, self._told = self._told, None
        return stage.take(kind)

    def leave(self) -> None:
        """The batch has ended with an error: whoever waits for the next pass waits for messages again, and hears of it there.

        It waits for nobody, and all of the ranks call it, each when it hears.
        """
        if self._led and not self._over:
            number = torch.tensor([_NONE], dtype=torch.uint8)
            self._left = dist.broadcast(number, group=self._group, group_src=0, async_op=True)

    def _tell(self, number: int) -> int:
        told = torch.tensor([number], dtype=torch.uint8)
        dist.broadcast(told, group=self._group, group_src=0)
        return int(told)
