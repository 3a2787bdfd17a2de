"""Bytes that training keeps: the dissertation's model (000, equations 4.1 to 4.5), ours, and those of a real run.

φ is the number of parameters, p the share that is pruned, f = 1 − p. Model state is weights, gradients and optimizer state, not
activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from axonn_plugins.optim.flat import TILE
from axonn_plugins.optim.index import BLOCK
from samo.optimizer import Optimizer
from samo.pruning import pruned_of
from samo.targets import Parameters, names_of, targets

ADAM, MOMENTUM, PLAIN = 8, 4, 0
"""Bytes of optimizer state an element: two moments, one, none."""


def dense_bytes(phi: int, state: int = ADAM, itemsize: int = 2) -> int:
    """Dense training: M^default of section 4.1.4, 20φ with Adam in mixed precision.

    2φ each for θ16 and ∇θ16, 4φ each for θ32 and ∇θ32, and the optimizer's state. In single precision there are no copies in 16
    bits: 16φ.

    Args:
        phi: parameters.
        state: bytes of optimizer state an element.
        itemsize: bytes of an element that the model computes with: 2, or 4 for single precision.
    """
    return phi * (state + (12 if itemsize == 2 else 8))


def paper_bytes(phi: int, sparsity: float, state: int = ADAM, itemsize: int = 2) -> float:
    """The dissertation's SAMO, equations 4.1 to 4.3: 24(1 − p)φ + 2φ with Adam in mixed precision.

    Of kept elements 18 bytes of compressed state, 4 of index, and 2 of the copy in 16 bits while weights are expanded; all
    elements of θ16. In single precision, as the same reasoning has it: dense θ32, compressed gradient, state and index.

    Args:
        phi: parameters.
        sparsity: p.
        state: see `dense_bytes`.
        itemsize: see `dense_bytes`.
    """
    kept = (1 - sparsity) * phi
    return itemsize * phi + kept * (state + (10 + 4 + 2 if itemsize == 2 else 4 + 4))


def paper_saving(phi: int, sparsity: float) -> float:
    """Bytes that the dissertation's SAMO saves of 20φ, equations 4.4 and 4.5: (24p − 6)φ."""
    return (24 * sparsity - 6) * phi


def our_bytes(phi: int, sparsity: float, state: int = ADAM, itemsize: int = 2, ranks: int = 1) -> float:
    """Bytes of this package's state: 2φ + 16fφ with Adam in mixed precision, 4φ + 14fφ in single.

    Of kept elements the gradient as the model computes, θ32, the optimizer's state and 2 bytes of index. What
    the step needs besides is one tile's (`predicted`).

    Args:
        phi: parameters.
        sparsity: p.
        state: see `dense_bytes`.
        itemsize: see `dense_bytes`.
        ranks: data-parallel ranks among which θ32 and the optimizer's state are shared (`shard`).
    """
    kept, master = (1 - sparsity) * phi, 4 if itemsize == 2 else 0
    return itemsize * phi + kept * (itemsize + 2 + (master + state) / ranks)


@dataclass(frozen=True)
class Layer:
    """One parameter.

    Attributes:
        numel: its elements.
        kept: how many are not pruned.
    """

    numel: int
    kept: int


@dataclass(frozen=True)
class Bytes:
    """Model state by what it is for, in bytes.

    Attributes:
        weights: dense, what the model computes with.
        gradients: compressed.
        masters: compressed weights in float32.
        state: the optimizer's.
        indices: where the kept elements are.
        buffers: one tile's, while the optimizer steps.
    """

    weights: int
    gradients: int
    masters: int
    state: int
    indices: int
    buffers: int

    @property
    def total(self) -> int:
        """All that lasts from step to step: without the buffers."""
        return sum(astuple(self)) - self.buffers


def layers_of(
    model: Parameters,
    sparsity: float,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    masks: Mapping[str, Tensor] | None = None,
) -> list[Layer]:
    """A model's parameters as pruning would leave them, each to the same sparsity; the meta device will do.

    Args:
        model: a module, or pairs of name and parameter.
        sparsity: of those that are pruned.
        include: see `samo.targets.targets`.
        exclude: see there.
        masks: count what these keep instead.
    """
    parameters = names_of(model)[0]
    kept = {name: parameter.numel() for name, parameter in parameters.items()}
    if masks is None:
        kept |= {name: kept[name] - pruned_of(kept[name], sparsity) for name in targets(model, include, exclude)}
    else:
        kept |= {name: int(mask.sum()) for name, mask in masks.items()}
    return [Layer(parameter.numel(), kept[name]) for name, parameter in parameters.items()]


def index_bytes(layer: Layer) -> int:
    """Bytes of a parameter's index: 2 an element and 8 a block of 65,536, or 4 an element, whichever is less; 0 if all are kept."""
    if layer.kept == layer.numel:
        return 0
    blocks = -(-layer.numel // BLOCK)
    short = 2 * layer.kept + 8 * (blocks + 1)
    return short if layer.numel >= 2**31 else min(short, 4 * layer.kept)


def predicted(layers: Sequence[Layer], state: int = ADAM, itemsize: int = 2, ranks: int = 1, tile: int = TILE) -> Bytes:
    """Bytes that `samo.Optimizer` keeps on a rank for parameters of one dtype.

    Left out are the optimizer's counters, such as Adam's 4 bytes a parameter and tile.

    Args:
        layers: the trained parameters.
        state: see `dense_bytes`.
        itemsize: see `dense_bytes`.
        ranks: see `our_bytes`; what pads buckets is left out.
        tile: kept elements updated at a time.
    """
    kept = sum(layer.kept for layer in layers)
    owned = -(-kept // ranks)
    pruned = any(0 < layer.kept < layer.numel for layer in layers)
    longest = min(tile, owned)
    return Bytes(
        weights=itemsize * sum(layer.numel for layer in layers),
        gradients=itemsize * kept,
        masters=4 * owned if itemsize == 2 else 0,
        state=state * owned,
        indices=sum(index_bytes(layer) for layer in layers),
        buffers=longest * (4 + 2 * pruned if itemsize == 2 else 4 * pruned),
    )


def measured(optimizer: Optimizer) -> Bytes:
    """Bytes that a `samo.Optimizer` holds on this rank, counted from its tensors; its state exists after the first step."""
    stores, entries = optimizer.stores, optimizer.entries
    return Bytes(
        weights=sum(entry.parameter.nbytes for entry in entries),
        gradients=sum(store.gradient.nbytes for store in stores),
        masters=sum(store.master.nbytes for store in stores if store.master is not None),
        state=sum(
            value.nbytes
            for values in optimizer.inner.state.values()
            for value in values.values()
            if isinstance(value, torch.Tensor)
        ),
        indices=sum(entry.index.nbytes for entry in entries if entry.index is not None),
        buffers=optimizer.buffers.nbytes,
    )
