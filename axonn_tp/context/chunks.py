"""Which tokens of a sequence each rank has, which of them its queries see, and what travels. No processes, no tensors of a model.

A sequence is cut into 2s chunks for s ranks, the last ones padded at their end. Rank i has chunks i and 2s−1−i (zigzag), so
that under a causal mask every rank computes as much as any other. Chunks of keys and values travel to the ranks that see them:

    gather    each chunk goes to its readers at once, and their gradients come back to be summed; in backward the keys and
              values are fetched again, so that nothing of other ranks is kept
    ring      every rank hands what it holds to the next, and computes on it meanwhile

or, by heads, every rank gets all tokens of some heads, of queries too, and gives the output of these back (DeepSpeed's Ulysses).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

HOW = ("gather", "ring", "heads")


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

    def of(self, rank: int | None) -> tuple[int, ...]:
        """The chunks of a rank, in their order; all where None."""
        return tuple(range(2 * self.ranks)) if rank is None else (rank, 2 * self.ranks - 1 - rank)

    def owner(self, chunk: int) -> int:
        """The rank that has a chunk."""
        return min(chunk, 2 * self.ranks - 1 - chunk)

    def places(self, rank: int | None) -> list[int]:
        """The places in the padded sequence of a rank's tokens; all where None."""
        return [chunk * self.size + at for chunk in self.of(rank) for at in range(self.size)]

    def order(self) -> list[int]:
        """Where the tokens of the padded sequence lie in all ranks' shares laid end to end."""
        starts = [self.owner(chunk) * self.share + self.size * (chunk >= self.ranks) for chunk in self.of(None)]
        return [start + at for start in starts for at in range(self.size)]


@dataclass(frozen=True)
class Sight:
    """The keys that a query sees, by its place.

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
        """The share of a chunk of keys that a chunk of queries sees: ``"none"``, ``"part"`` or ``"whole"``."""
        if not self.causal:
            return "whole"
        if key > query:
            return "none"
        nearest, furthest = (query - key - 1) * size + 1, (query - key + 1) * size - 1
        if self.window is not None and query > key and nearest >= self.window:
            return "none"
        return "whole" if query > key and (self.window is None or furthest < self.window) else "part"


@dataclass(frozen=True)
class Heads:
    """The heads that attention is given of one token of all this rank's samples.

    Attributes:
        samples: that this rank attends in.
        queries: heads of queries.
        keys: heads of keys and values, which divide them.
        key: features of a head of queries and of keys.
        value: of a head of values.
    """

    samples: int
    queries: int
    keys: int
    key: int
    value: int

    @property
    def kept(self) -> int:
        """Elements of keys and values."""
        return self.samples * self.keys * (self.key + self.value)

    def fit(self, ranks: int) -> bool:
        """True if as many heads of queries come to each of so many ranks."""
        return self.queries % ranks == 0

    def copies(self, ranks: int) -> int:
        """Number of copies of each head of keys where heads are dealt out, so that every rank has those of its queries."""
        return math.lcm(self.keys, ranks) // self.keys

    def dealt(self, ranks: int) -> int:
        """Elements of the queries, keys, values and outputs of one token that one rank has where heads are dealt out."""
        return self.samples * (self.queries + self.keys * self.copies(ranks)) // ranks * (self.key + self.value)


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

    def of(self, keys: Sequence[int]) -> Block:
        """The part with some of the keys."""
        return Block(self.rows, tuple(key for key in self.keys if key in keys), self.how)


@lru_cache(maxsize=1024)
def blocks(chunks: Chunks, rank: int | None, sight: Sight, documents: bool) -> tuple[Block, ...]:
    """The blocks of scores that a rank computes, its own keys first.

    Args:
        chunks: the sequence.
        rank: whose queries; None where those of all are here, in their order.
        sight: what queries see.
        documents: the sequence is several, or is padded where that is seen: every block is masked.
    """
    size, mine = chunks.size, chunks.of(rank)
    rows, others = (0, len(mine) * size), tuple(chunk for chunk in chunks.of(None) if chunk not in mine)
    if not documents and sight.window is None:
        found = [Block(rows, mine, "causal" if sight.causal else "whole")]
        if sight.causal and rank is not None:
            low, high = mine
            found += [Block(rows, others[:low], "whole"), Block((size, 2 * size), others[low : high - 1], "whole")]
        else:
            found.append(Block(rows, others, "whole"))
        return tuple(block for block in found if block.keys)
    made = []
    for number, query in enumerate(mine):
        for key in (*mine, *others):
            seen = sight.between(query, key, size)
            if seen != "none":
                masked = documents or seen == "part"
                made.append(Block((number * size, (number + 1) * size), (key,), "masked" if masked else "whole"))
    return tuple(sorted(made, key=lambda block: block.keys[0] not in mine))


@lru_cache(maxsize=1024)
def needed(chunks: Chunks, rank: int, sight: Sight) -> tuple[int, ...]:
    """Chunks of other ranks that a rank's queries see, ordered by their owners."""
    mine = chunks.of(rank)
    seen = {
        key
        for query in mine
        for key in chunks.of(None)
        if key not in mine and sight.between(query, key, chunks.size) != "none"
    }
    return tuple(sorted(seen, key=lambda chunk: (chunks.owner(chunk), chunk)))


@lru_cache(maxsize=1024)
def read_by(chunks: Chunks, rank: int, sight: Sight) -> tuple[tuple[int, int], ...]:
    """(reader, chunk) for each chunk of a rank that another rank sees, ordered by reader."""
    mine = chunks.of(rank)
    readers = (reader for reader in range(chunks.ranks) if reader != rank)
    return tuple((reader, chunk) for reader in readers for chunk in needed(chunks, reader, sight) if chunk in mine)


def sent(chunks: Chunks, rank: int, sight: Sight, how: str, heads: Heads, backward: bool = False) -> int:
    """Elements that a rank sends in one layer's forward pass, or in its backward pass.

    Args:
        chunks: the sequence.
        rank: the rank.
        sight: what queries see.
        how: one of `HOW`.
        heads: what attention is given.
        backward: of the backward pass: keys and values once more, and their gradients; by heads, gradients alone.
    """
    if how == "heads":
        return (chunks.ranks - 1) * chunks.share * heads.dealt(chunks.ranks)
    if how == "ring":
        return (chunks.ranks - 1) * chunks.share * heads.kept * (2 if backward else 1)
    out = len(read_by(chunks, rank, sight))
    back = len(needed(chunks, rank, sight)) if backward else 0
    return (out + back) * chunks.size * heads.kept


@lru_cache(maxsize=1024)
def cheaper(chunks: Chunks, sight: Sight, heads: Heads) -> str:
    """The way in which the busiest rank sends least; of those that are alike the first of `HOW`."""

    def busiest(how: str) -> int:
        return max(
            sum(sent(chunks, rank, sight, how, heads, backward) for backward in (False, True))
            for rank in range(chunks.ranks)
        )

    return min((how for how in HOW if how != "heads" or heads.fit(chunks.ranks)), key=busiest)
