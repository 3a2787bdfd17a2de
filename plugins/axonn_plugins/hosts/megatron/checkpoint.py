"""Checkpoints: every parameter as pieces of the matrix that Megatron itself would save, so that any grid and stock Megatron load it.

A rank holds a block of rows and columns of a matrix, or of the z-share of that block some rows. What lies over two dims, over z and in
several matrices one after the other (gate and up of a gated MLP) is rows of one width all the same: pieces of equally many rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.common.language_module import language_module
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import mlp, multi_token_prediction
from megatron.core.transformer import utils as transformer_utils
from torch import Tensor, nn

from axonn_plugins.autoload import on_import
from axonn_plugins.hosts.megatron import checkpoint_optimizer, checkpoint_training, process_groups
from axonn_plugins.hosts.megatron.originals import Originals
from axonn_tp.grid.layout import Layout
from axonn_tp.grid.mesh import Grid

_originals = Originals()
Offsets = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Pieces:
    """A rank's part of a parameter, as pieces of equally many rows.

    Attributes:
        offsets: of dims other than the first: (dim, this piece's number, number of pieces), as Megatron's.
        numbers: of this rank's pieces among all pieces of rows.
        count: pieces of rows in all.
        replica: this rank's number among those of its data-parallel group and model ranks that hold the same.
    """

    offsets: Offsets
    numbers: tuple[int, ...]
    count: int
    replica: tuple[int, int]


def pieces(layout: Layout, grid: Grid, at: Mapping[str, int]) -> Pieces:
    """Where the elements of a rank are in the whole parameter.

    Args:
        layout: of the parameter.
        grid: sizes of the axes.
        at: the rank's place on every axis.

    Raises:
        ValueError: a rank's share over z is not whole rows.
    """
    over = {dim: [axis for one, axis in layout.split if one == dim] for dim in range(len(layout.shape))}
    index = {dim: _number(grid, at, axes) for dim, axes in over.items()}
    count = {dim: math.prod(grid.size(axis) for axis in axes) for dim, axes in over.items()}
    offsets = tuple((dim, index[dim], count[dim]) for dim in over if dim > 0)
    part = layout.padded(grid)[0] // layout.parts
    rows = part // count[0]
    shares, share_number = (grid.gz, at["z"]) if layout.over_z else (1, 0)
    if rows * layout.parts % shares:
        raise ValueError(
            f"a weight of {rows * layout.parts} rows does not divide by gz = {shares}: such shares have no place in a torch_dist "
            "checkpoint; choose a gz that does, or save with --ckpt-format torch"
        )
    held = rows * layout.parts // shares
    size = math.gcd(rows, held)
    first = range(share_number * held, (share_number + 1) * held, size)
    numbers = tuple((row // rows * part + index[0] * rows + row % rows) // size for row in first)
    others = [axis for axis in ("x", "y") if axis not in layout.axes]
    same = at["data"] if layout.over_z else at["data"] * grid.gz + at["z"]
    return Pieces(offsets, numbers, layout.padded(grid)[0] // size, (_number(grid, at, others), same))


def _number(grid: Grid, at: Mapping[str, int], axes: list[str]) -> int:
    number = 0
    for axis in axes:
        number = number * grid.size(axis) + at[axis]
    return number


def sharded_parameter(
    parameter: Tensor, key: str, sharded_offsets: Offsets = (), tied: bool = False, allow_shape_mismatch: bool = False
) -> ShardedTensor | ShardedTensorFactory:
    """A parameter that carries a layout, for `megatron.core.dist_checkpointing`.

    Args:
        parameter: this rank's share.
        key: the whole parameter's.
        sharded_offsets: of what is prepended to it, such as the layer.
        tied: it is a copy of another pipeline stage's.
        allow_shape_mismatch: the stored one may have more or fewer rows, as a padded vocabulary.
    """
    mesh = process_groups.mesh()
    found = pieces(parameter.axonn_layout, mesh.grid, mesh.coordinates)  # type: ignore[attr-defined]
    before = len(sharded_offsets)
    offsets = (*sharded_offsets, *((before + dim, number, count) for dim, number, count in found.offsets))

    def piece(key: str, data: Tensor, number: int, replica_id: Any) -> ShardedTensor:
        rows = (before, number, found.count)
        return ShardedTensor.from_rank_offsets(
            key,
            data,
            *offsets,
            rows,
            replica_id=replica_id,
            prepend_axis_num=before,
            allow_shape_mismatch=allow_shape_mismatch,
        )

    replica_id = (int(tied), *found.replica)
    if len(found.numbers) == 1:
        return piece(key, parameter, found.numbers[0], replica_id)

    @torch.no_grad()
    def build(key: str, data: Tensor, replica_id: Any, flattened_range: Any = None) -> list[ShardedTensor]:
        chunks = data.chunk(len(found.numbers))
        return [piece(key, chunk, number, replica_id) for chunk, number in zip(chunks, found.numbers, strict=True)]

    return ShardedTensorFactory(key, parameter, build, torch.cat, replica_id)


def sharded_module(
    module: nn.Module, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, Any] | None = None
) -> dict[str, Any]:
    """`sharded_state_dict` of one of our layers."""
    return transformer_utils.make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets
    )


def install() -> None:
    """Have Megatron save and load by layouts; harmless when called again."""
    if _originals:
        return
    _originals.wrap(transformer_utils, "make_sharded_tensors_for_checkpoint", by_layout)
    _originals.wrap(mlp, "apply_swiglu_sharded_factory", _already_in_pieces)
    for copies in (language_module, multi_token_prediction):
        _originals.wrap(copies, "make_tp_sharded_tensor_for_checkpoint", _tied)
    for tracker in (CudaRNGStatesTracker, getattr(te, "TECudaRNGStatesTracker", None)):
        if isinstance(tracker, type):  # that of --te-rng-tracker is no class where Transformer Engine is not installed
            _originals.wrap(tracker, "set_states", _of_this_grid)
    checkpoint_optimizer.install(_originals)
    on_import("megatron.training.checkpointing", lambda module: checkpoint_training.install(module, _originals))


def uninstall() -> None:
    """Leave Megatron as it was before `install`."""
    _originals.restore()


def by_layout(original: Any) -> Any:
    """Megatron's ``make_sharded_tensors_for_checkpoint``, of parameters with a layout by that."""

    @wraps(original)
    def make(
        state_dict: dict[str, Any],
        prefix: str,
        axes: Any = None,
        sharded_offsets: Offsets = (),
        *args: Any,
        **named: Any,
    ) -> Any:
        ours = {name: one for name, one in state_dict.items() if hasattr(one, "axonn_layout")}
        rest = {name: one for name, one in state_dict.items() if name not in ours}
        axes = named.pop("tensor_parallel_layers_axis_map", axes)
        made = original(rest, prefix, axes, sharded_offsets, *args, **named) if rest else {}
        for name, one in ours.items():
            # Megatron pads a vocabulary to its tensor-parallel size.
            words = f"{prefix}{name}".endswith("word_embeddings.weight")
            made[f"{prefix}{name}"] = sharded_parameter(
                one, f"{prefix}{name}", tuple(sharded_offsets), allow_shape_mismatch=words
            )
        return made

    return make


def _already_in_pieces(original: Any) -> Any:
    """Gate and up are parts of our layouts."""

    @wraps(original)
    def apply(made: Any, *args: Any, **named: Any) -> Any:
        return made if hasattr(made.data, "axonn_layout") else original(made, *args, **named)

    return apply


def _tied(original: Any) -> Any:
    """The copy of the word embeddings in the pipeline stage of tied logits, or of multi-token prediction."""

    @wraps(original)
    def make(tensor: Tensor, key: str, *args: Any, **named: Any) -> Any:
        if not hasattr(tensor, "axonn_layout"):
            return original(tensor, key, *args, **named)
        return sharded_parameter(tensor, key, tied=True, allow_shape_mismatch=True)

    return make


def _of_this_grid(original: Any) -> Any:
    """States of another grid, or of stock Megatron, would have ranks with the same values draw different numbers."""

    @wraps(original)
    def set_states(self: Any, states: dict[str, Any]) -> None:
        if not {name for name in self.states_ if name.startswith("axonn")} - set(states):
            original(self, states)

    return set_states
