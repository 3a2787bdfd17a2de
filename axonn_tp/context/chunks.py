"""Which tokens of a sequence each rank has, which of them its queries see, and what travels. No processes, no tensors of a model.

A sequence is cut into 2s chunks for s ranks, the last ones padded at their end. Rank i has chunks i and 2s−1−i (zigzag), so
that under a causal mask every rank computes as much as any other. Chunks of keys and values travel to the ranks that see them:

    gather    each chunk goes to its readers at once, and their gradients come back to be summed; in backward the keys and
              values are fetched again, so that nothing of other ranks is kept
    ring      every rank hands what it holds to the next, and computes on it meanwhile
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

HOW = ("gather", "ring")


@dataclass(frozen=True)
class Chunks:
    """A sequence over ranks.

    Attributes:
        tokens: of the sequence, at least 1.
        ranks: that share it.
    """

    tokens: int
    ranks: int

    @property
    def size(self) -> int:
        """Tokens of a chunk, padding included: ⌈tokens / 2s⌉."""
        return -(-self.tokens // (2 * self.ranks))

    @property
    def share(self) -> int:
        """Tokens of a rank, padding included."""
        return 2 * self.size

    @property
    def padded(self) -> int:
        """Tokens of all ranks, padding included."""
        return self.share * self.ranks

    def of(self, rank: int) -> tuple[int, int]:
        """The chunks of a rank, in their order."""
        return rank, 2 * self.ranks - 1 - rank

    def owner(self, chunk: int) -> int:
        """The rank that has a chunk."""
        return min(chunk, 2 * self.ranks - 1 - chunk)

    def places(self, rank: int) -> list[int]:
        """The places in the padded sequence of a rank's tokens."""
        return [chunk * self.size + at for chunk in self.of(rank) for at in range(self.size)]

    def order(self) -> list[int]:
        """Where the tokens of the padded sequence lie in all ranks' shares laid end to end."""
        laid = [place for rank in range(self.ranks) for place in self.places(rank)]
        return sorted(range(self.padded), key=laid.__getitem__)


@dataclass(frozen=True)
class Sight:
    """What a query sees by its place.

    Attributes:
        causal: itself and what is before it; otherwise everything.
        window: of these the last so many, itself included; all when None.
    """

    causal: bool = True
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError(
                f"window = {self.window} with causal = {self.causal} is not known; give at least 1, with causal attention"
            )

    def between(self, query: int, key: int, size: int) -> str:
        """How much of a chunk of keys a chunk of queries sees: ``"none"``, ``"part"`` or ``"whole"``."""
        if not self.causal:
            return "whole"
        if key > query:
            return "none"
        nearest, furthest = (query - key - 1) * size + 1, (query - key + 1) * size - 1
        if self.window is not None and query > key and nearest >= self.window:
            return "none"
        return "whole" if query > key and (self.window is None or furthest < self.window) else "part"


@dataclass(frozen=True)
class Block:
    """A rectangle of the score matrix that is computed at once.

    Attributes:
        rows: of this rank's queries, first and after the last.
        keys: chunks.
        how: ``"whole"``; ``"causal"``: a triangle; ``"masked"``: by places and documents.
    """

    rows: tuple[int, int]
    keys: tuple[int, ...]
    how: str

    def of(self, keys: tuple[int, ...]) -> Block:
        """The part with some of the keys."""
        return Block(self.rows, tuple(key for key in self.keys if key in keys), self.how)


@lru_cache(maxsize=1024)
def blocks(chunks: Chunks, rank: int, sight: Sight, documents: bool) -> tuple[Block, ...]:
    """What a rank computes, its own keys first.

    Args:
        chunks: the sequence.
        rank: the rank.
        sight: what queries see.
        documents: the sequence is several, or is padded where that is seen: every block is masked.
    """
    size, (low, high) = chunks.size, chunks.of(rank)
    both, last = (0, 2 * size), (size, 2 * size)
    others = tuple(chunk for chunk in range(2 * chunks.ranks) if chunk not in (low, high))
    if not documents and sight.window is None:
        found = [Block(both, (low, high), "causal" if sight.causal else "whole")]
        if sight.causal:
            found += [Block(both, others[:low], "whole"), Block(last, others[low : high - 1], "whole")]
        else:
            found.append(Block(both, others, "whole"))
        return tuple(block for block in found if block.keys)
    made = []
    for number, query in enumerate((low, high)):
        for key in (low, high, *others):
            seen = sight.between(query, key, size)
            if seen != "none":
                masked = documents or seen == "part"
                made.append(Block((number * size, (number + 1) * size), (key,), "masked" if masked else "whole"))
    return tuple(sorted(made, key=lambda block: block.keys[0] not in (low, high)))


@lru_cache(maxsize=1024)
def needed(chunks: Chunks, rank: int, sight: Sight) -> tuple[int, ...]:
    """Chunks of other ranks that a rank's queries see, ordered by their owners."""
    mine = chunks.of(rank)
    seen = {
        key
        for query in mine
        for key in range(2 * chunks.ranks)
        if key not in mine and sight.between(query, key, chunks.size) != "none"
    }
    return tuple(sorted(seen, key=lambda chunk: (chunks.owner(chunk), chunk)))


def read_by(chunks: Chunks, rank: int, sight: Sight) -> Iterator[tuple[int, int]]:
    """(reader, chunk) for each chunk of a rank that another rank sees, ordered by reader."""
    for reader in range(chunks.ranks):
        if reader != rank:
            for chunk in needed(chunks, reader, sight):
                if chunks.owner(chunk) == rank:
                    yield reader, chunk


def sent(chunks: Chunks, rank: int, sight: Sight, how: str, width: int, backward: bool = False) -> int:
    """Elements that a rank sends in one layer's forward pass, or in its backward pass.

    Args:
        chunks: the sequence.
        rank: the rank.
        sight: what queries see.
        how: ``"gather"`` or ``"ring"``.
        width: elements of keys and values of one token and all samples of this rank: batch · (K heads · head + V heads · head).
        backward: of the backward pass: keys and values once more, and their gradients.
    """
    if how == "ring":
        return (chunks.ranks - 1) * chunks.share * width * (2 if backward else 1)
    out = len(list(read_by(chunks, rank, sight)))
    back = len(needed(chunks, rank, sight)) if backward else 0
    return (out + back) * chunks.size * width


def cheaper(chunks: Chunks, sight: Sight) -> str:
    """The way in which the busiest rank sends less; gathering where both are alike, as it goes in one message to each rank."""
    costs = {
        how: max(
            sent(chunks, rank, sight, how, 1) + sent(chunks, rank, sight, how, 1, True) for rank in range(chunks.ranks)
        )
        for how in HOW
    }
    return min(HOW, key=lambda how: costs[how])
