"""Records of one pass of a shadow, and the part that its layers take in a share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from axonn_tp.plan.search.dependencies import Reach
from axonn_tp.plan.search.replay import Call

TOLERANCE = 1e-6


class Mismatch(Exception):
    """A share computes something else than its part of the whole."""


@dataclass(frozen=True)
class Cut:
    """The part of one linear in a share: ``parts`` None for the layer that ends a pair, else the equal matrices of its output."""

    share: int
    shares: int
    parts: int | None = 1

    def of(self, tensor: Tensor) -> Tensor:
        """This share of features in the last dim.

        Raises:
            Mismatch: they do not divide.
        """
        pieces = tensor.chunk(self.parts or 1, -1)
        if any(piece.shape[-1] % self.shares for piece in pieces):
            raise Mismatch(f"{tensor.shape[-1]} features do not divide by {self.shares}")
        widths = [piece.shape[-1] // self.shares for piece in pieces]
        return torch.cat([p.narrow(-1, self.share * w, w) for p, w in zip(pieces, widths, strict=True)], -1)


@dataclass(frozen=True)
class Local:
    """Counts of one module (see `axonn_tp.plan.counted_attributes`) divided by `shares`."""

    module: str
    names: tuple[str, ...]
    shares: int


@dataclass
class Run:
    """One pass over the whole module.

    Attributes:
        inputs: input of each linear, by name, one a call.
        made: outputs of the linears, leaves of the autograd graph, with their names.
        rows: outputs of the embeddings, leaves as well.
        outputs: tensors that the pass returned.
        results: what each linear, and each watched embedding and norm, answered, one a call.
        arguments: what each module was first called with.
        read: the tensor objects that each linear was called with, and their versions, which tell whether two are one.
        blocks: the calls of blocks that may answer as others like them do.
        buffers: those that the pass changed, as it left them.
        slopes: gradients of what linears gave, where the pass goes through functions with a backward of the model's own (`axonn_tp.plan.search.slopes`).
    """

    inputs: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    read: dict[str, list[tuple[Tensor, int]]] = field(default_factory=lambda: defaultdict(list))
    made: list[tuple[str, Tensor]] = field(default_factory=list)
    rows: list[tuple[str, Tensor]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    results: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    arguments: dict[str, tuple[tuple, dict[str, Any]]] = field(default_factory=dict)
    blocks: dict[str, Call] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    slopes: dict[tuple[str, int], Tensor] | None = None

    def tensors(self, name: str) -> tuple[tuple[int, int], ...]:
        """The tensors that the linear `name` read: equal for two linears that read the same ones."""
        return tuple((id(tensor), version) for tensor, version in self.read[name])

    def settle(self) -> None:
        """Keep values alone, and forget what they were made of: it takes as much memory again."""
        self.inputs.update({name: [tensor.detach() for tensor in tensors] for name, tensors in self.inputs.items()})
        self.outputs = [tensor.detach() for tensor in self.outputs]
        self.made, self.rows, self.read = [], [], {}

    def consumers(self) -> dict[str, set[str]]:
        """For each linear the linears that read something made of its output; ``""`` is the pass' own output."""
        return self._reading(self.made, self.inputs)

    def users(self, parameters: Mapping[str, Tensor]) -> dict[str, set[str]]:
        """For each parameter or embedding the linears that read something made of it, and of no linear's output on the way; ``""`` as above."""
        leaves = [*parameters.items(), *self.rows]
        return self._reading(leaves, dict.fromkeys(name for name, _ in leaves))

    def _reading(self, leaves: Iterable[tuple[str, Tensor]], names: Iterable[str]) -> dict[str, set[str]]:
        bits = {name: 1 << i for i, name in enumerate(names)}
        reach = Reach({id(leaf): bits[name] for name, leaf in leaves})
        found: dict[str, set[str]] = {name: set() for name in bits}
        ends = [(name, tensor) for name, tensors in self.inputs.items() for tensor in tensors]
        for end, tensor in [*ends, *(("", tensor) for tensor in self.outputs)]:
            sources = reach(tensor)
            for name, bit in bits.items():
                if sources & bit:
                    found[name].add(end)
        return found


def check_same(got: Tensor, expected: Tensor, what: str) -> None:
    """Refuse a tensor that differs from what was expected.

    Raises:
        Mismatch: `what` has another shape or other values.
    """
    if got.shape != expected.shape:
        raise Mismatch(f"{what} has shape {tuple(got.shape)} instead of {tuple(expected.shape)}")
    if not same(got, expected):
        raise Mismatch(f"{what} has other values")


def check_outputs(outputs: Sequence[Tensor], run: Run) -> None:
    """Refuse what a pass gave where a whole one gave something else.

    Raises:
        Mismatch: it differs.
    """
    if len(outputs) != len(run.outputs):
        raise Mismatch("the number of outputs differs")
    for got, expected in zip(outputs, run.outputs, strict=True):
        check_same(got, expected, "the output")


def equal(got: Tensor, expected: Tensor) -> bool:
    """True if two tensors are equal, activations up to rounding."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    return same(got, expected) if got.is_floating_point() else torch.equal(got, expected)


def same(got: Tensor, expected: Tensor) -> bool:
    """True if two tensors of one shape are equal up to rounding."""
    return torch.allclose(got.detach(), expected.detach(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
