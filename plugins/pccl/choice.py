"""Which algorithm does a collective of a size on given nodes best."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

NATIVE = "native"
"""The algorithm's name that stands for the library which PCCL was put in front of."""


@dataclass(frozen=True)
class Choice:
    """An algorithm by name, and into how many chunks blocks are cut."""

    algorithm: str
    chunks: int = 1

    def __str__(self) -> str:
        return self.algorithm if self.chunks == 1 else f"{self.algorithm}/{self.chunks}"

    @staticmethod
    def read(text: str) -> Choice:
        """What `str` wrote.

        Raises:
            ValueError: it is not of the form "algorithm" or "algorithm/chunks".
        """
        algorithm, _, chunks = text.partition("/")
        if chunks and not (chunks.isdecimal() and int(chunks) > 0):
            raise ValueError(f"choice {text!r} has chunks that are no positive integer; write it as in ring/2")
        return Choice(algorithm, int(chunks or 1))


Times = dict[Choice, float]


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
        """Seconds of each choice at a size; beyond the sizes measured, those of the last of them."""
        known = sorted(self.times.get(collective, {}).items())
        if not known or size <= known[0][0]:
            return known[0][1] if known else {}
        for (low, before), (high, after) in pairwise(known):
            if size < high:
                part = math.log(size / low) / math.log(high / low)
                # A choice that is missing on one side was too slow there to be measured in earnest.
                return {
                    choice: before[choice] ** (1 - part) * after[choice] ** part for choice in before if choice in after
                } or before
        return known[-1][1]

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
        """What `dump` wrote.

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
    """What to use where nothing was measured.

    Args:
        collective: its name.
        size: bytes of all blocks.
        nodes: the group's ranks by node.
    """
    several, shared = len(nodes) > 1, any(len(node) > 1 for node in nodes)
    small = size <= 2**18
    if collective == "broadcast":
        return Choice("binomial") if size <= 2**16 else Choice("chain", 4)
    if not several:
        if collective == "all_reduce" and size <= 2**14:
            return Choice("tiny")
        return Choice("direct")
    if collective == "all_reduce" and size <= 2**12:
        return Choice("tiny")
    if not shared:
        return Choice("bruck" if size <= 2**19 else "ring")
    if size <= 2**21:
        # What messages cost, then what steps cost.
        return Choice("led_radix4" if small else "hierarchical_log_direct")
    if size >= 2**23 and sum(map(len, nodes)) > 16:
        # Bandwidth binds, and what one node passes on in one stream costs it less than several.
        return Choice("ring", 2 if collective == "all_reduce" else 1)
    return Choice("hierarchical_ring_direct", 2)
