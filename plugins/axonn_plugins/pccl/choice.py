"""Which algorithm does a collective of a size on given nodes best."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from axonn_plugins.pccl.options import Options

NATIVE = "native"
"""The algorithm's name that stands for the library which PCCL was put in front of."""
WINDOW = "window"
"""The same in memory that all of the group's GPUs see, registered with the library, to which and from which data are copied."""
_FEW_MESSAGES, _FEW_STEPS = 2**18, 2**21  # bytes up to which these cost more than bytes do
_SMALL_BLOCK = 2**15  # bytes of one node's; larger ones, several of them in a message, get into each other's way

_DESK, _MOST_AT_DESKS = 2**17, 16  # bytes, as in csrc/desk.hpp; ranks, of which each looks at all others


@dataclass(frozen=True)
class Choice:
    """An algorithm by name, and into how many chunks blocks are cut."""

    algorithm: str
    chunks: int = 1

    def __str__(self) -> str:
        return self.algorithm if self.chunks == 1 else f"{self.algorithm}/{self.chunks}"

    @staticmethod
    def read(text: str) -> Choice:
        """Read a choice that `str` wrote.

        Raises:
            ValueError: it is not of the form "algorithm" or "algorithm/chunks".
        """
        algorithm, _, chunks = text.partition("/")
        if chunks and not (chunks.isdecimal() and int(chunks) > 0):
            raise ValueError(f"choice {text!r} has chunks that are no positive integer; write it as in ring/2")
        return Choice(algorithm, int(chunks or 1))


Times = dict[Choice, float]
_UNTIMED = 8.0
_TELLING = 2**20  # bytes; beyond, what is best does not change with the size
_FAR = 16  # times


@dataclass
class Measured:
    """Seconds of each choice that was measured.

    Attributes:
        times: by collective, then by bytes of all blocks.
    """

    times: dict[str, dict[int, Times]] = field(default_factory=dict)

    def choose(self, collective: str, size: int, native: bool = True) -> Choice | None:
        """The fastest choice for a size, by times interpolated between the sizes measured next to it.

        Args:
            collective: its name.
            size: bytes of all blocks.
            native: whether the native library may be chosen.

        Returns:
            None where nothing was measured.
        """
        found = {
            choice: seconds
            for choice, seconds in self.estimate(collective, size).items()
            if native or choice.algorithm != NATIVE
        }
        return min(found, key=lambda choice: found[choice]) if found else None

    def estimate(self, collective: str, size: int) -> Times:
        """Seconds of each choice at a size, interpolated in the logarithms of size and time.

        Below the sizes measured they are those of the smallest; above, in proportion to the bytes, but nothing is known
        far beyond a largest size at which steps still count. A choice that was timed at only one of two sizes had
        little chance at the other, and is taken to be `_UNTIMED` times as slow as the best there.
        """
        known = sorted((bytes_, times) for bytes_, times in self.times.get(collective, {}).items() if times)
        if not known or size <= known[0][0]:
            return known[0][1] if known else {}
        for (low, before), (high, after) in pairwise(known):
            if size < high:
                part = math.log(size / low) / math.log(high / low)
                slow, slower = _UNTIMED * min(before.values()), _UNTIMED * min(after.values())
                return {
                    choice: before.get(choice, slow) ** (1 - part) * after.get(choice, slower) ** part
                    for choice in before | after
                }
        largest, times = known[-1]
        if largest < _TELLING and size > _FAR * largest:
            return {}
        return {choice: seconds * size / largest for choice, seconds in times.items()}

    def dump(self) -> str:
        """For a file or a store."""
        return json.dumps(
            {
                collective: {
                    size: {str(choice): seconds for choice, seconds in times.items()} for size, times in by.items()
                }
                for collective, by in self.times.items()
            }
        )

    @staticmethod
    def load(text: str) -> Measured:
        """Read measured times that `dump` wrote.

        Raises:
            ValueError: it did not write this.
        """
        try:
            return Measured(
                {
                    collective: {
                        int(size): {Choice.read(choice): float(seconds) for choice, seconds in times.items()}
                        for size, times in by.items()
                    }
                    for collective, by in json.loads(text).items()
                }
            )
        except (AttributeError, TypeError) as error:
            raise ValueError(f"measured times are not of the form that PCCL writes: {error}") from error


def choose(collective: str, size: int, nodes: Sequence[Sequence[int]]) -> Choice:
    """Choose by rules of thumb where nothing was measured.

    Args:
        collective: its name.
        size: bytes of all blocks.
        nodes: the group's ranks by node.
    """
    several, shared = len(nodes) > 1, any(len(node) > 1 for node in nodes)
    if collective == "broadcast":
        return Choice("binomial") if size <= 2**16 else Choice("chain", 4)
    if not several:
        if collective == "all_reduce" and size <= 2**14:
            return Choice("tiny")
        return Choice("direct")
    if collective == "all_reduce" and size <= 2**14:
        return Choice("led_doubling" if shared else "tiny")
    if not shared:
        return Choice("bruck" if size <= _SMALL_BLOCK * len(nodes) else "ring")
    if size <= _FEW_STEPS:
        return Choice("led_radix4" if size <= _FEW_MESSAGES else "hierarchical_log_direct")
    if size < 2**23 or sum(map(len, nodes)) <= 16:
        return Choice("hierarchical_ring_direct", 2)
    if collective == "reduce_scatter" or max(map(len, nodes)) == 2:
        # Bandwidth binds: what one node passes on in one stream costs it less than several, and goes at once.
        return Choice("ring")
    # Pieces smaller than what a few messages cost gain nothing, and make schedules long.
    chunks = min(4, max(1, size // len(nodes) // _SMALL_BLOCK))
    # With more ranks a node, a flat ring carries noticeably more over its link.
    return Choice("hierarchical_ring_direct", chunks)


def at_desks(collective: str, size: int, nodes: Sequence[Sequence[int]]) -> bool:
    """True if a collective is done at desks, which the ranks of a node have in memory that all of them see (csrc/desk.hpp).

    Args:
        collective: its name.
        size: bytes of all blocks.
        nodes: the group's ranks by node.
    """
    ranks = sum(map(len, nodes))
    part = -(-size // ranks) if collective == "all_gather" else size
    return collective != "broadcast" and len(nodes) == 1 and 1 < ranks <= _MOST_AT_DESKS and part <= _DESK


def prescribed(options: Options, collective: str, size: int, ranks: int) -> Choice | None:
    """The choice that the user's options prescribe; None for "auto".

    Args:
        options: them.
        collective: its name.
        size: bytes of all blocks.
        ranks: of the group.
    """
    algorithm = options.algorithm
    if algorithm == "auto":
        return None
    if collective == "broadcast":
        return {"ring": Choice("chain", 4), "recursive": Choice("binomial")}.get(algorithm)
    if algorithm == "hierarchical":
        few = Choice("led_radix4" if size <= _FEW_MESSAGES else "hierarchical_log_direct")
        return few if size <= _FEW_STEPS else Choice("hierarchical_ring_direct", 2)
    if algorithm == "recursive" and ranks & (ranks - 1):
        return Choice("bruck")
    return Choice(algorithm)
