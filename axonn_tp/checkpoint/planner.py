"""Planners of torch.distributed.checkpoint whose items are rectangles of the serial tensors."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, LoadPlan, LoadPlanner, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from axonn_tp.checkpoint.files import CheckpointError
from axonn_tp.grid.layout import Layout
from axonn_tp.grid.lazy import Cut, LazyTensor
from axonn_tp.grid.mesh import Grid
from axonn_tp.grid.regions import Region, regions

# A reader loads a whole stored piece to take a part of it.
_PIECE_BYTES = 64 * 2**20


def _serial() -> dict[str, int]:
    return Grid().coordinates(0)


@dataclass(frozen=True)
class Place:
    """A grid, and a rank's coordinates on it; the only rank of a serial run when nothing is given."""

    grid: Grid = field(default_factory=Grid)
    coordinates: Mapping[str, int] = field(default_factory=_serial)

    def of(self, layout: Layout) -> Place:
        """The rank's place on the grid that a layout is of."""
        if layout.grid is None:
            return self
        return Place(layout.grid, layout.grid.coordinates(self.grid.rank(**self.coordinates)))


@dataclass(frozen=True)
class Shard:
    """This rank's shard of a serial tensor.

    Attributes:
        tensor: a tensor of the rank's local shape, or a flat part of it.
        layout: how the serial tensor lies on the grid.
        start: which element of the flattened local tensor `tensor` begins with, as in a ZeRO partition.
        of_first: the first of the ranks that should hold the same writes it, since others may not.
    """

    tensor: Tensor
    layout: Layout
    start: int = 0
    of_first: bool = False

    def regions(self, place: Place) -> list[Region]:
        """The rectangles of the serial tensor that are in `tensor`, flattened."""
        stop, on = self.start + self.tensor.numel(), place.of(self.layout)
        return regions(self.layout, on.grid, on.coordinates, self.start, stop)

    def fill(self, whole: Any, place: Place) -> None:
        """Copy this rank's part of the serial tensor, or of anything that gives a tensor's slices."""
        flat = self.tensor.detach().contiguous().view(-1)
        for region in self.regions(place):
            region.view(flat).copy_(whole[region.cut] if region.cut else whole)
        self.tensor.copy_(flat.view(self.tensor.shape))


class SavePlanner(DefaultSavePlanner):
    """Writes each rectangle once: of ranks that hold the same, torch picks the one with the least to write, but of buffers the first.

    What is still in a file is read when it is written, by a writer that asks for a piece when the one before it is written.

    Args:
        place: the grid, and this rank's place on it. The state dict holds `Shard`s.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.place = place
        self._views: dict[MetadataIndex, Callable[[], Tensor]] = {}
        self._written: Tensor | None = None

    def set_up_planner(  # noqa: D102
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:  # noqa: D102
        self.plan = SavePlan([item for name, shard in self.state_dict.items() for item in self._items(name, shard)])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:  # noqa: D102
        plans, metadata = super().create_global_plan(all_plans)
        share_chunks(metadata)
        return plans, metadata

    def _items(self, name: str, shard: Shard) -> Iterator[WriteItem]:
        tensor, at = shard.tensor, self.place.of(shard.layout).coordinates
        if shard.of_first and not shard.layout.counted_here(at, ("x", "y", "z", "data")):
            return
        flat = tensor if isinstance(tensor, LazyTensor) else tensor.detach().reshape(-1)
        properties, size = TensorProperties(dtype=tensor.dtype), torch.Size(shard.layout.serial_shape)
        for region in shard.regions(self.place):
            for piece in region.pieces(_PIECE_BYTES // tensor.element_size()):
                index = MetadataIndex(name, piece.offsets)
                if isinstance(tensor, LazyTensor):
                    self._views[index] = partial(self._read, tensor, piece.cut)
                else:
                    self._views[index] = partial(piece.view, flat)
                yield WriteItem(
                    index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk_of(piece), properties, size)
                )

    def _read(self, lazy: LazyTensor, cut: Cut) -> Tensor:
        # torch's writer keeps what it has written to the end of a file.
        if self._written is not None:
            self._written.untyped_storage().resize_(0)
        self._written = lazy.source.read(cut).clone()
        return self._written

    def lookup_object(self, index: MetadataIndex) -> Tensor:  # noqa: D102
        return self._views[index]()


class RegionLoadPlanner(LoadPlanner):
    """Reads straight into the shards' memory.

    Args:
        place: the grid, and this rank's place on it. The state dict holds `Shard`s of contiguous tensors.

    Raises:
        CheckpointError: an element that is asked for stands in no stored piece, or in several.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._views: dict[MetadataIndex, Tensor] = {}
        self._found: dict[tuple[int, tuple[tuple[tuple[int, ...], ...], ...]], list[ReadItem]] = {}

    def set_up_planner(  # noqa: D102
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self.shards, self.metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:  # noqa: D102
        return LoadPlan([item for name, shard in self.shards.items() for item in self._items(name, shard)])

    def _items(self, name: str, shard: Shard) -> list[ReadItem]:
        found, flat = shard.regions(self.place), shard.tensor.detach().view(-1)
        if not found:
            return []
        for region in found:
            self._views[MetadataIndex(name, region.offsets)] = region.view(flat)
        stored = self.metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        # What stands in one list for many tensors is gone through once.
        key = id(stored.chunks), tuple((region.offsets, region.sizes) for region in found)
        if key in self._found:
            return [_renamed(item, name) for item in self._found[key]]
        items = create_read_items_for_chunk_list(name, stored, [chunk_of(region) for region in found])
        if sum(math.prod(item.lengths) for item in items) != sum(math.prod(region.sizes) for region in found):
            raise CheckpointError(
                f"the files of the checkpoint have not each element of {name} once, of shape {tuple(stored.size)}; restore them, or load another one"
            )
        self._found[key] = items
        return items

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:  # noqa: D102
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:  # noqa: D102
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:  # noqa: D102
        raise AssertionError(f"{read_item.storage_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:  # noqa: D102
        view = self._views[read_item.dest_index]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, offset, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: `resolve_tensor` gave the shard's own memory."""


def share_chunks(metadata: Metadata) -> None:
    """Tensors that are cut alike get one list of their chunks, by offsets, which then stands once in the file."""
    known: dict[tuple[tuple[tuple[int, ...], ...], ...], list[ChunkStorageMetadata]] = {}
    for stored in metadata.state_dict_metadata.values():
        if isinstance(stored, TensorStorageMetadata):
            chunks = sorted(stored.chunks, key=lambda chunk: chunk.offsets)
            stored.chunks = known.setdefault(tuple((chunk.offsets, chunk.sizes) for chunk in chunks), chunks)


def _renamed(item: ReadItem, name: str) -> ReadItem:
    """The same of another tensor."""
    dest, place = item.dest_index, item.storage_index
    return replace(
        item,
        dest_index=MetadataIndex(name, dest.offset, dest.index),
        storage_index=MetadataIndex(name, place.offset, place.index),
    )


def chunk_of(region: Region) -> ChunkStorageMetadata:
    """A rectangle in the words of torch.distributed.checkpoint."""
    return ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.sizes))
