"""Weights that a script writes between steps, where an optimizer keeps them in float32, or pruned, too.

Those that torch counts are taken. Others (``parameter.data.clamp_()``) the next step would undo without a word; they are looked for, in fewer
and fewer steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from axonn_plugins.optim.store import HALF, Entry

_PART = 2**16


class Writes:
    """Notes of parameters as a step leaves them, of their values behind the steps 0, 1, 2, 4, and so on.

    Args:
        apart: weights of all parameters are kept beside them; else those of 16 bits.
    """

    def __init__(self, apart: bool = False) -> None:
        self._apart, self._steps = apart, 0
        self._marks: dict[Tensor, tuple[int, int]] = {}
        self._numbers: dict[Entry, Tensor] = {}

    def end_step(self, entries: Iterable[Entry]) -> None:
        """Note the values that a step has made."""
        self._steps += 1
        self._numbers.clear()
        self.note(entries)

    def note(self, entries: Iterable[Entry]) -> None:
        """Their values now are nobody's but the optimizer's."""
        for entry in entries:
            parameter = entry.parameter
            self._marks[parameter] = _marks(parameter)
            undone = self._apart or entry.index is not None or parameter.dtype in HALF
            if undone and not self._steps & (self._steps - 1):
                self._numbers[entry] = _number(entry)

    def counted(self, parameter: Tensor) -> bool:
        """True if torch has counted a change since, or the parameter has other memory."""
        return _marks(parameter) != self._marks[parameter]

    def refusal(self) -> str | None:
        """The sentence about a parameter that was changed, and torch has counted nothing; looked for once between two steps."""
        found = None
        for entry in list(self._numbers):
            now = _number(entry)  # for which values that are on their way are waited for, and noted
            if not self.counted(entry.parameter) and not torch.equal(now, self._numbers[entry]):
                found = found or entry.name
        self._numbers.clear()
        return found and (
            f"{found!r} was changed by .data since the last step, which torch does not count, and the step would undo it by what it keeps beside the "
            "parameter (float32 weights, or a mask); change it under torch.no_grad(), without .data"
        )


def _marks(parameter: Tensor) -> tuple[int, int]:
    """Numbers that every change of a parameter's memory moves, or other memory in its place (``parameter.data = ...``)."""
    return parameter._version, parameter.data_ptr()


@torch.no_grad()
def _number(entry: Entry) -> Tensor:
    """A number that other bits change, but for chance; of pruned weights in full precision, how many of what is pruned are not zero."""
    flat = entry.parameter.detach().reshape(-1)
    if entry.index is None or flat.dtype in HALF:
        return _bits(flat)
    found = torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, flat.numel(), _PART):
        found += torch.count_nonzero(flat[begin : begin + _PART])
    for begin in range(0, entry.kept, _PART):
        found -= torch.count_nonzero(entry.read(flat, begin, min(begin + _PART, entry.kept)))
    return found


def _bits(flat: Tensor) -> Tensor:
    """The sum of the bits, eight bytes to a number, which needs no memory."""
    each = max(8 // flat.element_size(), 1)
    end = flat.numel() // each * each
    if flat.storage_offset() % each == 0:
        return flat[:end].view(torch.int64).sum() + flat[end:].view(torch.uint8).sum()
    found = torch.zeros((), dtype=torch.int64, device=flat.device)
    for part in flat.split(_PART):
        found += part.view(torch.uint8).sum()
    return found
