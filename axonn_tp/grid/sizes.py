"""The sizes of the 4D grid of ranks, and who sits where: pure arithmetic, without processes.

The axes, innermost first, are ``x``, ``y``, ``z`` and ``data`` (dissertation §5.1.1, Figure 5.1).
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import cache
from math import isqrt

AXES = ("x", "y", "z", "data")
SEVERAL = {
    "batch": ("data", "z"),
    "model": ("y", "x"),
    "tokens": ("data", "z", "x"),
    "grid": ("data", "z", "y", "x"),
}
"""Groups that span several axes, outermost first."""
ABOUT_SAMPLES = ("sequence", "readers", "replicas")
"""Groups by who reads which samples, where ranks of z share sequences."""


@dataclass(frozen=True)
class Grid:
    """Sizes of the four axes; a rank is ``x + gx·(y + gy·(z + gz·data))``.

    Attributes:
        gx: along x.
        gy: along y.
        gz: along z.
        gdata: along data.
        sequence: so many neighbours along z share the tokens of each sequence; the others read other samples.

    Raises:
        ValueError: a size is not a positive integer, or `sequence` does not divide gz.
    """

    gx: int = 1
    gy: int = 1
    gz: int = 1
    gdata: int = 1
    sequence: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, f"g{axis}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"g{axis} = {size!r} is not an integer of at least 1; give the number of ranks along {axis}"
                )
        shared = self.sequence
        if isinstance(shared, bool) or not isinstance(shared, int) or shared < 1 or self.gz % shared:
            raise ValueError(f"sequence = {shared!r} does not divide gz = {self.gz}; give one of its divisors")

    @classmethod
    def for_world(cls, world: int, gx: int = 1, gy: int = 1, gz: int = 1, sequence: int = 1) -> Grid:
        """The grid of `world` ranks; the data axis takes what x, y and z leave.

        Raises:
            ValueError: gx·gy·gz does not divide `world`.
        """
        tensor = cls(gx, gy, gz, sequence=sequence).world
        if world % tensor:
            raise ValueError(
                f"gx*gy*gz = {gx}*{gy}*{gz} = {tensor} does not divide the {world} ranks of this run; "
                f"choose sizes whose product divides {world}, or start a multiple of {tensor} ranks"
            )
        return cls(gx, gy, gz, world // tensor, sequence)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.gx * self.gy * self.gz * self.gdata

    @property
    def batch(self) -> int:
        """Number of ranks that read different tokens: gz·gdata."""
        return self.gz * self.gdata

    @property
    def readers(self) -> int:
        """Number of ranks that read different samples."""
        return self.batch // self.sequence

    def size(self, axis: str) -> int:
        """Size of one axis."""
        return int(getattr(self, f"g{axis}"))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` on every axis."""
        position = {}
        for axis in AXES:
            rank, position[axis] = divmod(rank, self.size(axis))
        return position

    def rank(self, x: int = 0, y: int = 0, z: int = 0, data: int = 0) -> int:
        """Rank at a position; inverse of `coordinates`."""
        return x + self.gx * (y + self.gy * (z + self.gz * data))

    def groups(self, axes: Container[str], stages: int = 1) -> list[tuple[int, ...]]:
        """The ranks of each group that spans `axes`, of so many grids one after the other."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world * stages):
            at = self.coordinates(rank % self.world)
            place = (rank // self.world, *(at[axis] for axis in AXES if axis not in axes))
            found.setdefault(place, []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def groups_about_samples(self, name: str, stages: int = 1) -> list[tuple[int, ...]]:
        """The ranks of each group of `ABOUT_SAMPLES`.

        Args:
            name: ``"sequence"``: ranks that differ in their tokens of the same samples alone; ``"readers"``: in their samples
                alone; ``"replicas"``: all that read the same samples.
            stages: see `groups`.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world * stages):
            at = self.coordinates(rank % self.world)
            samples, tokens = (at["data"], at["z"] // self.sequence), (at["z"] % self.sequence,)
            plane = (at["x"], at["y"])
            place = {"sequence": (*samples, *plane), "readers": (*tokens, *plane), "replicas": samples}[name]
            found.setdefault((rank // self.world, *place), []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def draw(self) -> str:
        """The grid as text: one x-y plane of ranks for every z and data."""
        width = len(str(self.world - 1))
        blocks = []
        for data in range(self.gdata):
            planes = []
            for z in range(self.gz):
                rows = [f"z={z} data={data}"]
                for y in range(self.gy):
                    rows.append(" ".join(f"{self.rank(x, y, z, data):>{width}}" for x in range(self.gx)))
                planes.append(rows)
            column = max(len(row) for rows in planes for row in rows)
            blocks.append(
                "\n".join(
                    "   ".join(f"{cell:<{column}}" for cell in line).rstrip() for line in zip(*planes, strict=True)
                )
            )
        sizes = " ".join(f"g{axis}={self.size(axis)}" for axis in AXES)
        return f"{self.world} ranks, {sizes} (x to the right, y down)\n" + "\n".join(blocks)


def factorisations(world: int) -> Iterator[Grid]:
    """Every grid of `world` ranks, in lexicographic order of (gx, gy, gz)."""
    for gx in divisors(world):
        for gy in divisors(world // gx):
            for gz in divisors(world // (gx * gy)):
                yield Grid(gx, gy, gz, world // (gx * gy * gz))


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, smallest first."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))
