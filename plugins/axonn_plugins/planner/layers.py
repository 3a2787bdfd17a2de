"""What 4D grids split: a model as blocks of linears, or convolutions, and what lies between them. All sizes are of one sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["bias", "activation", "dropout", "norm"]


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
    """

    name: str
    k: int
    n: int
    transposed: bool
    takes: int = 1
    gives: int = 1
    kernel: int = 1

    @property
    def weights(self) -> int:
        """How many it has."""
        return self.k * self.n * self.kernel


@dataclass(frozen=True)
class Attention:
    """Attention of each position to all: heads of queries and of keys and values, and features of each."""

    positions: int
    heads: int
    kv_heads: int
    width: int

    @property
    def products(self) -> int:
        """Multiplications of a sample, of queries by keys and of their weights by values."""
        return 2 * self.heads * self.width * self.positions**2


@dataclass(frozen=True)
class Between:
    """An element-wise operation, or a norm, over positions of so many features."""

    kind: Kind
    positions: int
    width: int


@dataclass(frozen=True)
class Block:
    """What a model repeats.

    Attributes:
        linears: in the order in which they run.
        between: all else but attention.
        attention: if there is one.
        count: how many the model has.
    """

    linears: tuple[Linear, ...]
    between: tuple[Between, ...] = ()
    attention: Attention | None = None
    count: int = 1

    @property
    def products(self) -> int:
        """Multiplications of a sample in one, forward."""
        attended = 0 if self.attention is None else self.attention.products
        return attended + sum(linear.weights * linear.gives for linear in self.linears)

    @property
    def parameters(self) -> int:
        """Of one: weights, biases, and two for each feature of a norm."""
        norms = sum(2 * one.width for one in self.between if one.kind == "norm")
        return sum(linear.weights + linear.n for linear in self.linears) + norms


def transformer(
    *, layers: int, sequence: int, hidden: int, inner: int, heads: int, kv_heads: int, width: int
) -> tuple[Block, ...]:
    """A transformer's layers, which are all alike; every other linear is transposed.

    Args:
        layers: how many.
        sequence: positions of a sample.
        hidden: features between layers.
        inner: features within the MLP.
        heads: of attention.
        kv_heads: of keys and values.
        width: features of a head.
    """
    linear = lambda name, k, n, transposed: Linear(name, k, n, transposed, sequence, sequence)  # noqa: E731
    kinds: tuple[tuple[Kind, int], ...] = (
        *(("bias", inner), ("bias", hidden), ("bias", hidden), ("activation", inner), ("dropout", inner)),
        *(("dropout", hidden), ("dropout", hidden), ("norm", hidden), ("norm", hidden)),
    )
    block = Block(
        linears=(
            linear("qkv", hidden, (heads + 2 * kv_heads) * width, False),
            linear("proj", heads * width, hidden, True),
            linear("fc1", hidden, inner, False),
            linear("fc2", inner, hidden, True),
        ),
        between=tuple(Between(kind, sequence, features) for kind, features in kinds),
        attention=Attention(sequence, heads, kv_heads, width),
        count=layers,
    )
    return (block,)
