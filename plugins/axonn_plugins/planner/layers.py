"""A model as 4D grids split it: blocks of linears, or convolutions, and the operations between them. All sizes are of one sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_REMADE = ("bias", "dropout")
Kind = Literal["bias", "activation", "gate", "dropout", "norm"]


def remade(name: str, gated: bool) -> bool:
    """True if backward makes again the output of an operation, because that is cheap: masks, and a gated MLP's product.

    Args:
        name: the operation's, or its kind.
        gated: whether the model's MLPs are.
    """
    return name.endswith(_REMADE) or (gated and name.endswith("fc2"))


@dataclass(frozen=True)
class Linear:
    """One linear layer or convolution: k features in, n out; a transposed one has x and y swapped.

    Attributes:
        name: which.
        k: features, or channels, that come in.
        n: that go out.
        transposed: contracts over x and splits its output over y.
        takes: positions of a sample that come in.
        gives: that go out.
        kernel: positions of a convolution's kernel, each with its k × n weights (003, section III-B).
        copies: experts, each with such a matrix; `takes` and `gives` count a position for each expert that it goes to.
    """

    name: str
    k: int
    n: int
    transposed: bool
    takes: int = 1
    gives: int = 1
    kernel: int = 1
    copies: int = 1

    @property
    def weights(self) -> int:
        """Number of its weights, of all experts."""
        return self.k * self.n * self.kernel * self.copies

    @property
    def products(self) -> int:
        """Multiplications of a sample."""
        return self.k * self.n * self.kernel * self.gives


@dataclass(frozen=True)
class Attention:
    """Attention of each position to all: heads of queries and of keys and values, and features of each; of values 0 for as many.

    Of a latent, `latent` features of a position go between ranks that share a sequence, instead of keys and values, and `rebuilt`
    multiplications make these of it.
    """

    positions: int
    heads: int
    kv_heads: int
    width: int
    value_width: int = 0
    latent: int = 0
    rebuilt: int = 0

    @property
    def products(self) -> int:
        """Multiplications of a sample, of queries by keys and of their weights by values."""
        return self.heads * (self.width + (self.value_width or self.width)) * self.positions**2


@dataclass(frozen=True)
class Scan:
    """The work of a mixer between its first and last matrix, in time that grows with the positions: a state-space model or linear attention.

    In chunks (Dao & Gu 2024, arXiv 2405.21060): each of its features reads and writes a state, and meets the positions of its chunk before it.

    Attributes:
        positions: of a sample.
        heads: among which its features are dealt out.
        gives: features that its first matrices make of a position.
        takes: features that its last matrix takes.
        state: numbers that each of these keeps.
        chunk: positions; 0 where it goes from one to the next.
    """

    positions: int
    heads: int
    gives: int
    takes: int
    state: int
    chunk: int

    @property
    def products(self) -> int:
        """Multiplications of a sample."""
        return self.positions * self.takes * (4 * self.state + self.chunk) // 2


@dataclass(frozen=True)
class Between:
    """An element-wise operation, or a norm, over positions of so many features."""

    kind: Kind
    positions: int
    width: int


@dataclass(frozen=True)
class Block:
    """The layers that a model repeats.

    Attributes:
        linears: in the order in which they run.
        between: all else but attention.
        attention: if there is one.
        scan: likewise.
        count: how many the model has.
    """

    linears: tuple[Linear, ...]
    between: tuple[Between, ...] = ()
    attention: Attention | None = None
    count: int = 1
    scan: Scan | None = None

    @property
    def products(self) -> int:
        """Multiplications of a sample in one, forward."""
        mixed = sum(one.products for one in (self.attention, self.scan) if one is not None)
        return mixed + sum(linear.products for linear in self.linears)

    @property
    def parameters(self) -> int:
        """Parameters of one: weights, biases, and two for each feature of a norm."""
        norms = sum(2 * one.width for one in self.between if one.kind == "norm")
        return sum(linear.weights + linear.n * linear.copies for linear in self.linears) + norms
