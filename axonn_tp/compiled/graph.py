"""Functions that the compiler takes into its graph whole: of tensors and constants, a mesh by its name."""

from __future__ import annotations

from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from axonn_tp.comm import collectives
from axonn_tp.grid.mesh import Mesh
from axonn_tp.layers import cross_entropy, layer_norm, rms_norm

_numbers = count()
_meshes: WeakValueDictionary[str, Mesh] = WeakValueDictionary()


def name_of(mesh: Mesh) -> str:
    """A name that no other mesh of this process has had: compiled code is reused where all names are equal."""
    found = next((name for name, known in _meshes.items() if known is mesh), None)
    if found is None:
        found = f"mesh {next(_numbers)}"
        _meshes[found] = mesh
    return found


@torch.compiler.allow_in_graph
def copy_to(tensor: Tensor, mesh: str, axis: str) -> Tensor:
    """`axonn_tp.comm.collectives.copy_to`, and so the others."""
    return collectives.copy_to(tensor, _meshes[mesh], axis)


@torch.compiler.allow_in_graph
def reduce_from(tensor: Tensor, mesh: str, axis: str) -> Tensor:  # noqa: D103
    return collectives.reduce_from(tensor, _meshes[mesh], axis)


@torch.compiler.allow_in_graph
def split_to(tensor: Tensor, mesh: str, axis: str) -> Tensor:  # noqa: D103
    return collectives.split_to(tensor, _meshes[mesh], axis)


@torch.compiler.allow_in_graph
def gather_from(tensor: Tensor, mesh: str, axis: str) -> Tensor:  # noqa: D103
    return collectives.gather_from(tensor, _meshes[mesh], axis)


@torch.compiler.allow_in_graph
def gather_weight(shard: Tensor, mesh: str) -> Tensor:  # noqa: D103
    return collectives.gather_weight(shard, _meshes[mesh])


@torch.compiler.allow_in_graph
def layer_normalised(input: Tensor, eps: float, mesh: str) -> Tensor:
    """Rows of which this rank has 1/gy, by the moments of the whole."""
    return layer_norm.Normalise.apply(input, eps, _meshes[mesh])


@torch.compiler.allow_in_graph
def rms_normalised(input: Tensor, eps: float, mesh: str) -> Tensor:
    """Rows of which this rank has 1/gy, by the mean square of the whole."""
    return rms_norm.Normalise.apply(input, eps, _meshes[mesh])


@torch.compiler.allow_in_graph
def losses(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor | None,
    classes: int | None,
    smoothing: float,
    ignored: int,
    mesh: str,
    axes: str,
) -> tuple[Tensor, Tensor]:
    """`axonn_tp.layers.cross_entropy.rows`; `axes`: their names in one word."""
    return cross_entropy.rows(logits, targets, weight, classes, smoothing, ignored, _meshes[mesh], tuple(axes))
