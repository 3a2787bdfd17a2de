"""The smallest magnitudes of many tensors, exactly, without a copy of them, on one process or over the ranks of a mesh.

The bits of a non-negative float, read as an integer, are in the order of the floats; those of a negative one in the reverse
order. So the threshold is found digit by digit, 11 bits at a time: a histogram of the next digit says which one the threshold
has. Histograms of ranks are summed, those of many parameters at once; each rank reads its own elements a chunk at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

CHUNK = 2**20
"""Elements that are looked at together."""
_DIGIT = 11


@dataclass(frozen=True)
class Shard:
    """The place of a rank's part in the whole parameter.

    Attributes:
        shape: of the whole parameter.
        copies: how many ranks hold this same part.
        positions: makes an int64 tensor of the part's shape: where each element is in the whole, flattened; −1 for padding.
            None: the part is the whole.
        inputs: the dim of the whole along which its layer's inputs lie.
    """

    shape: tuple[int, ...]
    copies: int = 1
    positions: Callable[[], Tensor] | None = None
    inputs: int = 1

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    def part_of(self, whole: Tensor) -> Tensor:
        """This part of a tensor of the whole's shape; what is padding is zero, or false."""
        if self.positions is None:
            return whole
        where = self.positions().to(whole.device)
        part = whole.reshape(-1)[where.clamp(min=0)]
        return part & (where >= 0) if whole.dtype == torch.bool else part * (where >= 0)

    def whole_of(self, part: Tensor) -> Tensor:
        """A tensor of the whole's shape with this part, and zeros."""
        if self.positions is None:
            return part
        where, flat = self.positions().reshape(-1), part.reshape(-1)
        whole = part.new_zeros(self.numel)
        whole[where[where >= 0]] = flat[where >= 0]
        return whole.view(self.shape)


@dataclass(frozen=True)
class Shards:
    """A model of which each rank holds a part.

    Attributes:
        group: the ranks that hold all parts; all of them must call.
        find: the shard that a rank holds of a parameter, by its name.
        average: makes gradients of this rank's part of the batch, in ``parameter.grad``, those of the whole batch.
        device: of what the group sums; None: the parameters', for ranks all of which hold some.
    """

    group: dist.ProcessGroup
    find: Callable[[str, Tensor], Shard]
    average: Callable[[Iterable[nn.Parameter]], None] | None = None
    device: torch.device | None = None

    def names(self, names: Iterable[str]) -> list[str]:
        """The names on all ranks, in the order of the ranks."""
        found: list[list[str]] = [[] for _ in range(dist.get_world_size(self.group))]
        dist.all_gather_object(found, list(names), group=self.group)
        return list(dict.fromkeys(name for theirs in found for name in theirs))


def total(counts: Tensor, shards: Shards | None) -> Tensor:
    """Counts, each divided by the copies of what was counted, summed over the ranks: int64."""
    if shards is not None:
        dist.all_reduce(counts, group=shards.group)
    return counts.round().long()


class Part:
    """The elements of one parameter that this process holds.

    Args:
        name: the parameter's.
        tensor: the elements, or what they are judged by.
        shard: what they are of the whole; None: the whole.
        signed: whether they are judged as they are, and not by their magnitudes.
    """

    def __init__(self, name: str, tensor: Tensor, shard: Shard | None, signed: bool = False) -> None:
        self.name, self.shape, self._signed = name, tensor.shape, signed
        self.flat = tensor.detach().reshape(-1)
        self.weight = 1.0 if shard is None else 1.0 / shard.copies
        self._positions = None if shard is None else shard.positions
        self._real: Tensor | None = None
        if self._positions is not None:
            real = self._positions().reshape(-1) >= 0
            self._real = None if bool(real.all()) else real
        self.real_numel = self.flat.numel() if self._real is None else int(self._real.sum())

    def real(self, begin: int, end: int) -> Tensor | None:
        """Which of the elements are not padding; None: all."""
        return None if self._real is None else self._real[begin:end]

    def keys(self, begin: int, end: int, wide: bool) -> Tensor:
        """Integers in the order of the elements' magnitudes, or of the elements: int32, or int64 where `wide`."""
        values = self.flat[begin:end]
        # A negative zero is made one without a sign.
        values = values + 0.0 if self._signed else values.abs()
        keys = values.double().view(torch.int64) if wide else values.float().view(torch.int32)
        return torch.where(keys < 0, keys ^ torch.iinfo(keys.dtype).max, keys) if self._signed else keys

    def positions(self, where: Tensor) -> Tensor:
        """Positions in the whole parameter of the elements with these indices."""
        return where if self._positions is None else self._positions().reshape(-1)[where]

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Begins and ends of the chunks."""
        length = self.flat.numel()
        return ((begin, min(begin + CHUNK, length)) for begin in range(0, length, CHUNK))


class Magnitudes:
    """The magnitudes of parameters, of which the smallest can be pruned.

    Args:
        parameters: by name.
        shards: of a model whose parts are on several ranks.
        scores: of the parameters' shapes, by name, which are to be selected by in their place, signs and all; None: magnitudes.

    Attributes:
        undecided: names of those in the last selection of which some were pruned, and all of whose magnitudes are equal.

    Raises:
        ValueError: there is a NaN among them, on any rank.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        shards: Shards | None = None,
        scores: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.shards = shards
        find = {name: None if shards is None else shards.find(name, tensor) for name, tensor in parameters.items()}
        judged = parameters if scores is None else scores
        self.parts = {name: Part(name, judged[name], find[name], scores is not None) for name in parameters}
        self.names = list(parameters) if shards is None else shards.names(parameters)
        here = next((part.flat.device for part in self.parts.values()), torch.device("cpu"))
        self._device = here if shards is None or shards.device is None else shards.device
        facts = torch.zeros(3, len(self.names), dtype=torch.float64, device=self._device)
        for column, name in enumerate(self.names):
            part = self.parts.get(name)
            if part is not None:
                nan = any(bool(part.flat[begin:end].isnan().any()) for begin, end in part.chunks())
                wide = part.flat.dtype == torch.float64
                # Rounded once summed: one rank with a NaN must not vanish among copies.
                facts[:, column] = torch.tensor([part.real_numel * part.weight, nan, wide], device=self._device)
        counts, nans, wide = total(facts, shards)
        if nans.any():
            raise ValueError(
                f"{self.names[int(nans.nonzero()[0])]!r} holds NaN, which has no magnitude; prune a model that has not diverged"
            )
        self.sizes = dict(zip(self.names, counts.tolist(), strict=True))
        self._wide = bool(wide.any())
        self.undecided: list[str] = []

    def keep(self, groups: Sequence[tuple[Sequence[str], int]]) -> dict[str, Tensor]:
        """Masks that are false for the `count` smallest magnitudes of all elements of each group, and for padding.

        Of equal magnitudes those of a group's first parameters, and in a parameter those of the first positions, are pruned.
        Ranks exchange the histograms of all groups together.

        Args:
            groups: pairs of names and count; no name is in two of them.

        Returns:
            By name, of the parts that this process holds, in their shapes.
        """
        masks: dict[str, Tensor] = {}
        some: list[tuple[Sequence[str], int]] = []
        for names, count in groups:
            if 0 < count < sum(self.sizes[name] for name in names):
                some.append((names, count))
            else:
                masks |= {name: self._all(self.parts[name], count == 0) for name in names if name in self.parts}
        parts = [[self.parts[name] for name in names if name in self.parts] for names, _ in some]
        found = self._kth(lambda: self._magnitudes(parts), [count for _, count in some], 6 if self._wide else 3)
        left = [count - below for (_, count), (_, below) in zip(some, found, strict=True)]
        thresholds = {name: key for (names, _), (key, _) in zip(some, found, strict=True) for name in names}
        edges = self._edges([names for names, _ in some], thresholds, left)
        for name, threshold in thresholds.items():
            if name in self.parts:
                masks[name] = self._mask(self.parts[name], threshold, edges.get(name))
        return masks

    def kept(self, masks: Mapping[str, Tensor]) -> dict[str, int]:
        """Number of elements of each whole parameter that these masks keep, on all ranks together.

        Args:
            masks: by name, of the parts that this process holds.
        """
        counts = torch.zeros(len(self.names), dtype=torch.float64, device=self._device)
        for number, name in enumerate(self.names):
            if name in masks:
                counts[number] = int(masks[name].sum()) * self.parts[name].weight
        return dict(zip(self.names, total(counts, self.shards).tolist(), strict=True))

    def _all(self, part: Part, kept: bool) -> Tensor:
        mask = torch.full_like(part.flat, kept, dtype=torch.bool)
        real = part.real(0, part.flat.numel())
        return (mask if real is None else mask & real).view(part.shape)

    def _magnitudes(self, groups: list[list[Part]]) -> Iterator[tuple[int, Tensor, float]]:
        for number, parts in enumerate(groups):
            for part in parts:
                for begin, end in part.chunks():
                    keys, real = part.keys(begin, end, self._wide), part.real(begin, end)
                    yield number, keys if real is None else keys[real], part.weight

    def _kth(
        self, chunks: Callable[[], Iterable[tuple[int, Tensor, float]]], ranks: list[int], digits: int
    ) -> list[tuple[int, int]]:
        """For each group the key with `rank` smaller or equal keys before it, and how many are smaller.

        Args:
            chunks: number of the group, keys, and what each counts for.
            ranks: by group.
            digits: that keys have.
        """
        # The first digit has the sign.
        lowest = 2 ** (_DIGIT - 1)
        found = [(0, 0)] * len(ranks)
        if not ranks:
            return found
        for shift in reversed(range(0, digits * _DIGIT, _DIGIT)):
            histogram = torch.zeros(len(ranks), 2**_DIGIT, dtype=torch.float64, device=self._device)
            for number, keys, weight in chunks():
                if shift < (digits - 1) * _DIGIT:
                    keys = keys[keys >> (shift + _DIGIT) == found[number][0]]
                    digit = (keys >> shift) & (2**_DIGIT - 1)
                else:
                    digit = (keys >> shift) + lowest
                counted = torch.bincount(digit, minlength=2**_DIGIT)
                histogram[number] += counted.to(self._device) * weight
            smaller = nn.functional.pad(total(histogram, self.shards).cumsum(1), (1, 0))
            wanted = torch.tensor([rank - below for rank, (_, below) in zip(ranks, found, strict=True)])
            digit = torch.searchsorted(smaller[:, 1:].contiguous(), wanted[:, None].to(self._device), right=True)
            below = smaller.gather(1, digit)
            pairs = torch.cat([digit, below], 1).tolist()
            found = [(key << _DIGIT | d, b + c) for (key, b), (d, c) in zip(found, pairs, strict=True)]
            if shift == (digits - 1) * _DIGIT:
                found = [(key - lowest, below) for key, below in found]
        return found

    def _edges(
        self, groups: list[Sequence[str]], thresholds: Mapping[str, int], counts: Sequence[int]
    ) -> dict[str, int]:
        """For each parameter the position before which elements at the threshold are pruned, so that these are `counts` of each group."""
        names = list(thresholds)
        ties = torch.zeros(len(names), dtype=torch.float64, device=self._device)
        for number, name in enumerate(names):
            if name in self.parts:
                part = self.parts[name]
                ties[number] = self._ties(part, thresholds[name]).numel() * part.weight
        here = dict(zip(names, total(ties, self.shards).tolist() if names else [], strict=True))
        edges, divided = {}, {}
        for group, count in zip(groups, counts, strict=True):
            for name in group:
                if count >= here[name]:
                    edges[name] = 2**62
                elif count > 0:
                    divided[name] = count
                count = max(count - here[name], 0)

        self.undecided = [name for name in divided if here[name] == self.sizes[name]]

        def positions() -> Iterator[tuple[int, Tensor, float]]:
            for number, name in enumerate(divided):
                if name in self.parts:
                    part = self.parts[name]
                    yield number, part.positions(self._ties(part, thresholds[name])), part.weight

        found = self._kth(positions, list(divided.values()), 5)
        return edges | {name: edge for name, (edge, _) in zip(divided, found, strict=True)}

    def _ties(self, part: Part, threshold: int) -> Tensor:
        """Indices of a part's elements at the threshold."""
        found = []
        for begin, end in part.chunks():
            tied, real = part.keys(begin, end, self._wide) == threshold, part.real(begin, end)
            found.append((tied if real is None else tied & real).nonzero().reshape(-1) + begin)
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64, device=part.flat.device)

    def _mask(self, part: Part, threshold: int, edge: int | None) -> Tensor:
        mask = torch.empty_like(part.flat, dtype=torch.bool)
        for begin, end in part.chunks():
            torch.ge(part.keys(begin, end, self._wide), threshold, out=mask[begin:end])
            real = part.real(begin, end)
            if real is not None:
                mask[begin:end] &= real
        if edge is not None:
            ties = self._ties(part, threshold)
            mask[ties[part.positions(ties) < edge]] = False
        return mask.view(part.shape)
