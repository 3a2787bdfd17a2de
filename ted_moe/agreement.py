"""What ranks ask each other before any of them sends tokens, so that none waits for what does not come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from axonn_tp.collectives import Pending, start_all_reduce
from ted_moe.topology import Topology

_LEAST = torch.iinfo(torch.int64).min
_UNLIKE = ("were given {low} to {high} tokens", "were given as many tokens, which go to other experts")


def question(capacity: int, alike: Sequence[int], place: int, places: int) -> list[int]:
    """What a rank puts into the maximum over its block.

    Args:
        capacity: slots an expert that it needs.
        alike: numbers that must be the same in its tensor group.
        place: of its tensor group in the block.
        places: tensor groups there.

    Returns:
        The capacity, then each tensor group's numbers and their negatives; of other groups the least that there is.
    """
    own = [*alike, *(-number for number in alike)]
    before, behind = place * len(own), (places - place - 1) * len(own)
    return [capacity, *[_LEAST] * before, *own, *[_LEAST] * behind]


def answer(maxima: Sequence[int], places: int) -> tuple[int, tuple[int, int, int, int] | None]:
    """What the block's maxima say.

    Args:
        maxima: of every rank's `question`.
        places: tensor groups in the block.

    Returns:
        The largest capacity, and None; or in its place which tensor group is not alike, in which of the numbers, and the least
        and the largest of these.
    """
    capacity, values = maxima[0], maxima[1:]
    count = len(values) // (2 * places)
    for place in range(places):
        numbers = values[2 * count * place : 2 * count * (place + 1)]
        for number in range(count):
            low, high = -numbers[count + number], numbers[number]
            if low != high:
                return capacity, (place, number, low, high)
    return capacity, None


class Agreement:
    """A question to the ranks of a block that is under way: the largest capacity, and whether tensor groups are alike.

    No rank can know that the others' batches are like its own, so all ask each time, for a few integers, while tokens are
    routed. Where the group has a backend for the CPU no accelerator waits for the answer.

    Args:
        capacity: slots an expert that this rank needs.
        tokens: that it was given.
        groups: a `Groups`, or axes of size 1.
        device: the tokens'.
        routed: a number that stands for where they go.
    """

    def __init__(self, capacity: int, tokens: int, groups: Any, device: torch.device, routed: int = 0) -> None:
        self._capacity, self._groups = capacity, groups
        self._pending: Pending | None = None
        if groups.size("block") == 1:
            return
        tensor = groups.size("tensor")
        alike = (tokens, routed) if tensor > 1 else ()
        values = question(capacity, alike, groups.rank("block") // tensor, groups.size("block") // tensor)
        on_host = torch.device("cpu") in groups.group("block")._device_types
        told = torch.tensor(values, device="cpu" if on_host else device)
        self._pending = start_all_reduce(told, groups, "block", "max")

    def wait(self) -> int:
        """The largest capacity.

        Raises:
            ValueError: tensor ranks were not given the same tokens; on every rank of the block.
        """
        if self._pending is None:
            return self._capacity
        tensor = self._groups.size("tensor")
        capacity, unlike = answer(self._pending.wait().tolist(), self._groups.size("block") // tensor)
        if unlike is not None:
            place, number, low, high = unlike
            topology: Topology = self._groups.topology
            first = topology.block_group(dist.get_rank())[place * tensor]
            raise ValueError(
                f"ranks {first} to {first + tensor - 1} are one tensor group and {_UNLIKE[number].format(low=low, high=high)}; give the "
                "ranks of a tensor group the same tokens"
            )
        return capacity
