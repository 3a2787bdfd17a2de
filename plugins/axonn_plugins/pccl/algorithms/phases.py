"""A pattern of steps carried out by some of the ranks: the pieces that collectives are put together from."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_plugins.pccl.algorithms.patterns import Pattern
from axonn_plugins.pccl.builder import Builder

Blocks = tuple[int, ...]


def gather(
    builder: Builder,
    members: Sequence[int],
    parts: Sequence[Blocks],
    pattern: Pattern,
    held: dict[int, Blocks] | None = None,
    chunks: Sequence[int] = (),
) -> None:
    """All-gather among `members`: member i starts with the blocks parts[i], and each ends with all.

    `held` names blocks that a rank has besides, which nobody then sends to it; `chunks` are those to gather, by
    default all.
    """
    if builder.rank not in members:
        return
    held = held or {}
    for step in pattern(members.index(builder.rank), len(members)):
        to, source = members[step.to], members[step.source]
        sends = _without(_union(parts, step.sends), held.get(to, ()))
        receives = _without(_union(parts, step.receives), held.get(builder.rank, ()))
        for chunk in chunks or range(builder.chunks):
            builder.send(to, sends, chunk)
            builder.receive(source, receives, chunk)


def scatter(
    builder: Builder,
    members: Sequence[int],
    parts: Sequence[Blocks],
    pattern: Pattern,
    chunks: Sequence[int] = (),
) -> None:
    """Reduce-scatter among `members`: each starts with a partial sum of every block, i ends with the sums of parts[i]."""
    if builder.rank not in members:
        return
    builder.phase()
    for step in reversed(pattern(members.index(builder.rank), len(members))):
        builder.step()
        sends, sums = _union(parts, step.receives), _union(parts, step.sends)
        for chunk in chunks or range(builder.chunks):
            builder.send(members[step.source], sends, chunk)
            builder.reduce(members[step.to], sums, chunk)


def _union(parts: Sequence[Blocks], which: Blocks) -> Blocks:
    return tuple(block for part in which for block in parts[part])


def _without(blocks: Blocks, held: Blocks) -> Blocks:
    return tuple(block for block in blocks if block not in held) if held else blocks
