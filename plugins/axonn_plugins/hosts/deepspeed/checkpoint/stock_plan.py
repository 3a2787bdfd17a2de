"""Where stock DeepSpeed-MoE keeps what of an optimizer's state: arithmetic on names and sizes alone.

Its ranks are all data ranks; rank r has the experts of place r % ep_size. Dense parameters come before the experts, unless the
script has sorted them apart. Under ZeRO-1 and 2 a group is flattened and cut into a partition for each rank that shares it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

EXPERT = re.compile(r"(.*\bdeepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")
# DeepSpeed's max_group_size: larger groups of experts it cuts in two.
LARGEST = 178_956_971


def is_expert(name: str) -> bool:
    """True if a parameter of this name is an expert's."""
    return EXPERT.fullmatch(name) is not None


@dataclass(frozen=True)
class Group:
    """A parameter group of stock's optimizer.

    Attributes:
        source: which of the groups that the script made it is of.
        names: of its parameters, as every rank numbers its own experts.
    """

    source: int
    names: tuple[str, ...]

    @property
    def experts(self) -> bool:
        """True if experts are in it, and nothing else then."""
        return is_expert(self.names[0])

    def dealt(self, count: int) -> Group:
        """With the parameters in the order of DeepSpeed's round_robin_gradients."""
        return replace(self, names=tuple(name for first in range(count) for name in self.names[first::count]))


def stock_groups(sources: Sequence[Sequence[str]], numel: Mapping[str, int], largest: int = LARGEST) -> list[Group]:
    """The groups that stock DeepSpeed makes.

    Args:
        sources: names by group, as the script makes them.
        numel: elements of whole parameters.
        largest: elements in a group of experts.
    """
    if any(names and all(map(is_expert, names)) for names in sources):
        return [Group(source, tuple(names)) for source, names in enumerate(sources) if names]
    found = [Group(source, tuple(n for n in names if not is_expert(n))) for source, names in enumerate(sources)]
    for source, names in enumerate(sources):
        members: list[str] = []
        for name in filter(is_expert, names):
            if members and sum(numel[member] for member in members) + numel[name] > largest:
                found.append(Group(source, tuple(members)))
                members = []
            members.append(name)
        found.append(Group(source, tuple(members)))
    return [group for group in found if group.names]


def renumbered(names: Sequence[str], local: Mapping[str, int]) -> list[str]:
    """A group's names where a rank has another number of a layer's experts.

    Args:
        names: in the group's order.
        local: experts of a rank by what is before their number.
    """

    def layer(name: str) -> str:
        found = EXPERT.fullmatch(name)
        return found[1] if found else ""

    made: list[str] = []
    for before, run in groupby(names, layer):
        if not before:
            made += run
            continue
        parts = [EXPERT.fullmatch(name).groups() for name in run]  # type: ignore[union-attr]
        after = [rest for _, number, rest in parts if number == parts[0][1]]
        made += [f"{before}{number}{rest}" for number in range(local[before]) for rest in after]
    return made


@dataclass(frozen=True)
class Flat:
    """A flattened group.

    Attributes:
        sizes: elements of its parameters.
        gaps: unused elements behind each.
        count: partitions.
    """

    sizes: tuple[int, ...]
    gaps: tuple[int, ...]
    count: int

    @classmethod
    def aligned(cls, sizes: Sequence[int], count: int, alignment: int = 1) -> Flat:
        """With every parameter but the first at a multiple of `alignment`."""
        gaps = [-size % alignment for size in sizes[:-1]]
        return cls(tuple(sizes), (*gaps, 0), count)

    @property
    def used(self) -> int:
        """Elements without those that make partitions equal."""
        return sum(self.sizes) + sum(self.gaps)

    @property
    def size(self) -> int:
        """Elements of a partition, an even number."""
        return 2 * math.ceil(self.used / (2 * self.count))

    def padding(self, partition: int) -> int:
        """Elements at a partition's end that no parameter has."""
        return min(self.size, max(0, self.size * (partition + 1) - self.used))

    @property
    def offsets(self) -> list[int]:
        """Where each parameter begins."""
        return list(accumulate((a + b for a, b in zip(self.sizes, self.gaps, strict=True)), initial=0))[:-1]

    def pieces(self, partition: int) -> list[tuple[int, int, int, int]]:
        """Parts of parameters in a partition: (parameter, its first element, elements, where in the partition)."""
        begin, found = self.size * partition, []
        for place, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            low, high = max(offset, begin), min(offset + size, begin + self.size)
            if low < high:
                found.append((place, low - offset, high - low, low - begin))
        return found

    def places(self, parameter: int) -> list[tuple[int, int, int]]:
        """Where a parameter's elements are, in their order: (partition, where in it, elements)."""
        at, end, found = self.offsets[parameter], self.offsets[parameter] + self.sizes[parameter], []
        while at < end:
            partition, inside = divmod(at, self.size)
            length = min(end - at, self.size - inside)
            found.append((partition, inside, length))
            at += length
        return found
