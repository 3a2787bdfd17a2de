"""Questions between ranks before any of them sends tokens, so that none waits for what does not come, or gets what it did not ask for."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_tp.comm.collectives import Pending, start_all_reduce
from axonn_tp.comm.overlap import in_backward
from axonn_tp.comm.stalls import ADVICE, BACKWARD, calls_of
from ted_moe.topology import Groups, Topology

_LEAST, _MOST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
_UNLIKE = (
    "were given {low} to {high} tokens",
    "were given as many tokens, which go to other experts, or are drawn for by other lots",
    "were given as many tokens, but other ones",
)
_ROUGH, _WATCHED = 0.01, 3


def question(capacity: int, alike: Sequence[int], place: int, places: int, mixture: int = 0) -> list[int]:
    """Make the row of integers that a rank puts into the maximum over its block.

    Args:
        capacity: slots an expert that it needs.
        alike: numbers that must be the same in its tensor group.
        place: of its tensor group in the block.
        places: tensor groups there.
        mixture: the number of the layer that asks.

    Returns:
        The capacity, the mixture's number and its negative, then each tensor group's numbers and their negatives; of other groups the least that there is.
    """
    own = [*alike, *(-number for number in alike)]
    before, behind = place * len(own), (places - place - 1) * len(own)
    return [capacity, mixture, -mixture, *[_LEAST] * before, *own, *[_LEAST] * behind]


def answer(maxima: Sequence[int], places: int, rough: int = 0) -> tuple[int, tuple[int, int, int, int] | None]:
    """Read the largest capacity from the maxima of a block, and find the first tensor group whose ranks differ.

    Args:
        maxima: of every rank's `question`.
        places: tensor groups in the block.
        rough: how many of the numbers, the last, are `projections`, and need be alike but for rounding.

    Returns:
        The largest capacity, and None; or in its place which tensor group is not alike, in which of the numbers, and the least
        and the largest of these. Where ranks ask for several mixtures the group is -1, and the two are these.
    """
    (capacity, last, first), values = maxima[:3], maxima[3:]
    if last != -first:
        return capacity, (-1, 0, -first, last)
    count = len(values) // (2 * places)
    for place in range(places):
        numbers = values[2 * count * place : 2 * count * (place + 1)]
        highs, lows = numbers[:count], [-number for number in numbers[count:]]
        for number, (low, high) in enumerate(zip(lows, highs, strict=True)):
            if number < count - rough:
                differs = low != high
            else:
                differs = _real(high) - _real(low) > _ROUGH * _real(highs[-1])
            if differs:
                return capacity, (place, number, low, high)
    return capacity, None


def projections(rows: Tensor) -> list[int]:
    """Numbers that other rows, or the same in another order, change by about as much as the last one, which is a norm.

    They are given as integers in the same order, of which a maximum can be taken beside exact ones.

    Args:
        rows: (..., M).
    """
    rows = rows.detach().reshape(-1, rows.shape[-1]).float()
    seen = rows @ _signs(rows.shape[1], 0, rows.device).to(rows)
    found = [*(seen @ _signs(len(seen), seed, rows.device).to(seen) for seed in (1, 2)), seen.norm()]
    return [_whole(number) for number in torch.stack(found).double().nan_to_num(0.0, 0.0, 0.0).tolist()]


@lru_cache(maxsize=64)
def _signs(count: int, seed: int, device: torch.device) -> Tensor:
    """Random, but the same on every rank and each time."""
    generator = torch.Generator().manual_seed(seed)
    return (2.0 * torch.randint(2, (count,), generator=generator) - 1.0).to(device)


def _whole(number: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits if bits >= 0 else bits ^ _MOST


def _real(number: int) -> float:
    found: float = struct.unpack("<d", struct.pack("<q", number if number >= 0 else number ^ _MOST))[0]
    return found


class Agreement:
    """A question to the ranks of a block that is under way: the largest capacity, and whether tensor groups are alike.

    No rank can know that the others' batches are like its own, so all ask each time, for a few integers, while tokens are
    routed.

    Args:
        capacity: slots an expert that this rank needs.
        tokens: that it was given, S × M.
        groups: a `Groups`, or axes of size 1.
        exact: a number that must be the same in a tensor group, of where tokens go, or of what that is drawn from.
        mixture: the number of the layer (`Groups.enrol`).
        trained: this rank's experts are, or some of them.

    Attributes:
        trained: of any rank's experts, once it is answered.
    """

    def __init__(
        self, capacity: int, tokens: Tensor, groups: Any, exact: int = 0, mixture: int = 0, trained: bool = False
    ) -> None:
        self._capacity, self._groups, self.trained = capacity, groups, trained
        self._pending: Pending | None = None
        if groups.size("block") == 1:
            return
        note(groups, "block", mixture)
        tensor = groups.size("tensor")
        alike = (len(tokens), exact, *projections(tokens)) if tensor > 1 else ()
        place, places = groups.rank("block") // tensor, groups.size("block") // tensor
        values = question(capacity, alike, place, places, 2 * mixture + trained)
        self._pending = start_all_reduce(_told(values, groups, tokens.device), groups, "block", "max")

    def wait(self) -> int:
        """The largest capacity.

        Raises:
            ValueError: tensor ranks were not given the same tokens, or ranks call several mixtures; on every rank of the block.
        """
        if self._pending is None:
            return self._capacity
        capacity, last, first, *rest = self._pending.wait().tolist()
        self.trained = bool(last % 2)
        capacity, unlike = _answered([capacity, last // 2, -(-first // 2), *rest], self._groups)
        if unlike is not None:
            place, number, low, high = unlike
            if place < 0:
                raise ValueError(several((low, high), groups=self._groups))
            raise ValueError(
                f"{_tensor_group(self._groups, place)} and {_UNLIKE[min(number, 2)].format(low=low, high=high)}; give the "
                "ranks of a tensor group the same tokens"
            )
        return capacity


def several(numbers: Sequence[int], groups: Any, ranks: Sequence[int] = ()) -> str:
    """The sentence about ranks that exchange tokens for two mixtures at once.

    Args:
        numbers: of the mixtures, two or one of each rank.
        groups: a `Groups`.
        ranks: whose numbers they are; where it is not known, none.
    """
    found = {number: place for place, number in reversed(list(enumerate(numbers)))}
    named = [groups.mixtures.get(number, "another layer") for number in found]
    on = [f" on rank {ranks[place]}" if ranks else "" for place in found.values()]
    said = " and ".join(f"{name}{where}" for name, where in zip(named, on, strict=True))
    return f"ranks that exchange tokens called several mixtures in one place: {said}; {ADVICE}"


def note(groups: Any, axis: str, mixture: int) -> None:
    """Say which mixture the next collective of an axis is for (`axonn_tp.comm.stalls`)."""
    calls_of(groups.group(axis)).note(f"mixture {groups.mixtures.get(mixture, mixture)}")


def check_callers(told: Tensor, mixture: int, groups: Any) -> None:
    """See that all ranks of the expert group exchange for one mixture.

    Args:
        told: each rank's number, P.
        mixture: this rank's.
        groups: a `Groups`.

    Raises:
        ValueError: some do for another; on all of them.
    """
    if (others := told.tolist()) != [mixture] * len(others):
        raise ValueError(several(others, groups, groups.ranks("expert")))


def begin_forward(groups: Any, device: torch.device, meet: Callable[[int], None]) -> None:
    """A mixture has asked the others; where backward comes next, it asks them once more, so that no rank takes gradients for tokens.

    Only on the CPU: elsewhere the host would wait for the accelerator.

    Args:
        groups: a `Groups`, or axes of size 1.
        device: of the tokens.
        meet: asks, with a number in the place of the mixture's.
    """
    if groups.size("expert") > 1 and device.type == "cpu" and not in_backward():
        groups.meet = meet


def begin_backward(groups: Any) -> None:
    """Before gradients of tokens are exchanged: ask, where the last exchange was of a forward, if all come back.

    Raises:
        ValueError: a rank is in another mixture's forward; on all ranks that exchange tokens.
    """
    meet, groups.meet = groups.meet, None
    if meet is not None:
        meet(groups.enrol(BACKWARD))
    calls_of(groups.group("expert")).note(BACKWARD)


def _told(values: list[int], groups: Any, device: torch.device) -> Tensor:
    """Where the group can send from: the CPU, where it has a backend for that, so that no accelerator waits for the answer."""
    return torch.tensor(values, device="cpu" if torch.device("cpu") in groups.group("block")._device_types else device)


def _answered(maxima: Sequence[int], groups: Any) -> tuple[int, tuple[int, int, int, int] | None]:
    tensor = groups.size("tensor")
    return answer(maxima, groups.size("block") // tensor, rough=3 if tensor > 1 else 0)


def _tensor_group(groups: Any, place: int) -> str:
    topology: Topology = groups.topology
    first = groups.ranks("block")[place * topology.tensor]
    return f"ranks {first} to {first + topology.tensor - 1} are one tensor group"


def watch_outputs(expert: nn.Module, groups: Groups) -> None:
    """Refuse, in the first passes, an expert of a script's own splitting that gives the tensor ranks other outputs for the same tokens.

    A token's result would depend on the slot that it has come to.
    """
    left = [_WATCHED]
    tensor = groups.size("tensor")

    def watch(module: nn.Module, inputs: tuple, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # recomputed in backward
            return
        first = output[0] if isinstance(output, tuple) else output
        values = question(0, projections(first), groups.rank("block") // tensor, groups.size("block") // tensor)
        told = _told(values, groups, first.device)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=groups.group("block"))
        _, unlike = _answered(told.tolist(), groups)
        if unlike is not None:
            raise ValueError(
                f"{_tensor_group(groups, unlike[0])}, and its parts of an expert give other outputs for the same tokens; sum them in the "
                "expert, as Megatron's row-parallel layer does, or make the experts whole and the same on these ranks"
            )
        left[0] -= 1
        if not left[0]:
            handle.remove()

    handle = expert.register_forward_hook(watch)


def same_seed(groups: Groups) -> int | None:
    """The seed of the first tensor rank, from which all draw; None where there is no other. Every rank calls it."""
    if groups.size("tensor") == 1:
        return None
    seed = torch.tensor(torch.initial_seed() % 2**63, device=groups.sender("tensor", torch.device("cpu")))
    dist.broadcast(seed, group=groups.group("tensor"), group_src=0)
    return int(seed)
