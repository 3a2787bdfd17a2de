"""Save a training run on one grid, and load it on any other or in one process."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from axonn_tp.checkpoint import files
from axonn_tp.checkpoint.background import Saving
from axonn_tp.checkpoint.dealt import DealtNames
from axonn_tp.checkpoint.files import CheckpointError, SummingWriter
from axonn_tp.checkpoint.merging import merged
from axonn_tp.checkpoint.optimizer import (
    check_scheduler,
    groups_of,
    matched_groups,
    optimizer_state,
    optimizer_targets,
    regrouped,
    scheduler_state,
    whole_pieces,
)
from axonn_tp.checkpoint.planner import Place, RegionLoadPlanner, SavePlanner
from axonn_tp.checkpoint.randomness import (
    random_state,
    read_random_state,
    set_random_state,
    source_rank,
    write_random_state,
    writers_of,
)
from axonn_tp.checkpoint.ranks import Ranks
from axonn_tp.checkpoint.state import Notes, Shards, model_state, model_targets, restore_modules
from axonn_tp.checkpoint.sums import Sums, flush, in_words
from axonn_tp.grid.lazy import LazyTensor
from axonn_tp.grid.mesh import Grid, Mesh


def save(
    folder: str | os.PathLike,
    model: nn.Module,
    mesh: Mesh | None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    extra: Any = None,
    asynchronous: bool = False,
    keep_last: int | None = None,
) -> Saving | None:
    """Write a checkpoint that any grid can load; every rank of the mesh calls it, with a folder that all see.

    It is complete or absent: a checkpoint of that name before stays loadable until the new one is complete.
    The states of the random number generators go along.

    Args:
        folder: its name.
        model: a model that `parallelize` split, or a serial one.
        mesh: the model's mesh; None for a serial model in one process.
        optimizer: a torch optimizer whose states have their parameters' shapes, or are single numbers.
        scheduler: anything with `state_dict`, as torch's schedulers.
        extra: what else to keep, as the position in the data or a GradScaler's state; rank 0's is written.
        asynchronous: copy to the CPU, return, and write in the background.
        keep_last: when this one is complete, delete the complete checkpoints in the same folder but for so many that were
            finished last, this one among them; the one that the run was loaded from is one like the others. None: keep all.

    Returns:
        What to wait for, when asynchronous.

    Raises:
        ValueError: `keep_last` is not a number of at least 1.
        CheckpointError: the same on every rank.
    """
    check_kept(keep_last)

    def collect() -> tuple[Shards, Notes]:
        shards, notes = model_state(model)
        notes = {"model": notes, "extra": extra}
        if optimizer is not None:
            states, notes["optimizer"] = optimizer_state(optimizer, whole_pieces(model, optimizer))
            shards |= states
        if scheduler is not None:
            notes |= scheduler_state(scheduler)
        return shards, notes

    ranks, names = Ranks(mesh), DealtNames(model)
    shards, notes = ranks.together(collect)
    if names:
        notes = merged(ranks, names.notes(notes, names.outward))
        shards = {names.outward(name): shard for name, shard in shards.items()}
    return write(Path(folder), shards, notes, ranks, asynchronous, keep_last)


def check_kept(keep_last: int | None) -> None:
    """Refuse a `keep_last` of `save` that keeps nothing.

    Raises:
        ValueError: it is not a number of at least 1.
    """
    if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1):
        raise ValueError(
            f"keep_last = {keep_last!r} is not an integer of at least 1; correct it, or keep all with None"
        )


def write(
    folder: Path,
    shards: Shards,
    notes: Notes,
    ranks: Ranks,
    asynchronous: bool = False,
    keep_last: int | None = None,
) -> Saving | None:
    """Write shards and notes; `save` for states that were collected in another way.

    Args:
        folder: the checkpoint.
        shards: what this rank holds.
        notes: rank 0's are written; where their "random" is None, who reads it keeps the random number generators as they are.
        ranks: all that call this.
        asynchronous: see `save`.
        keep_last: see `save`.
    """
    notes, folder = {"random": random_state(), **notes}, folder.absolute()  # for a script that goes elsewhere meanwhile
    if not asynchronous:
        _write(folder, shards, notes, ranks, keep_last)
        return None

    def copied() -> tuple[Shards, Notes]:
        copies = {name: replace(shard, tensor=_copy(shard.tensor)) for name, shard in shards.items()}
        return copies, notes if ranks.rank else copy.deepcopy(notes)

    copies, kept = ranks.together(lambda: files.saying(folder, ranks.rank, copied))
    return Saving(lambda: _write(folder, copies, kept, ranks, keep_last))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _write(folder: Path, shards: Shards, notes: Notes, ranks: Ranks, keep_last: int | None) -> None:
    mark = ranks.together(lambda: files.begin(folder), only=0)
    try:
        _fill(folder, mark, shards, notes, ranks, keep_last)
    except CheckpointError:  # on all ranks, none of which writes any more
        if ranks.rank == 0:
            files.abandon(folder, mark)
        raise


def _fill(folder: Path, mark: str, shards: Shards, notes: Notes, ranks: Ranks, keep_last: int | None) -> None:
    # The planner drops what it read of a file when the next piece is asked for.
    unread = any(isinstance(shard.tensor, LazyTensor) for shard in shards.values())
    writer = SummingWriter(files.aside(folder), one_by_one=unread)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save(
                shards,
                storage_writer=writer,
                planner=SavePlanner(ranks.place),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(f"checkpoint {folder} was not written, for rank {rank} had {cause!r}") from None
    # torch notes shapes and dtypes too, but not of tensors without elements.
    tensors = {name: (shard.layout.serial_shape, shard.tensor.dtype) for name, shard in shards.items()}
    own = {name: tensors[name] for name, shard in shards.items() if ranks.apart or shard.layout.home}
    draws, aside = notes["random"], files.aside(folder)
    writers = None if draws is None else writers_of(draws, ranks.group)

    def drawn() -> Sums:
        return write_random_state(aside, draws, writers, ranks.rank) if writers else {}

    written = ranks.together(lambda: files.saying(folder, ranks.rank, drawn))
    gathered = ranks.collect((writer.sums | written, own))

    def complete() -> None:
        for _, others in gathered:
            tensors.update(others)
        state = {**notes, "tensors": tensors, "random": writers, "grid": asdict(ranks.place.grid)}
        torch.save(state, files.aside(folder) / files.STATE)
        flush(files.aside(folder) / files.STATE)
        files.commit(folder, {name: pieces for sums, _ in gathered for name, pieces in sums.items()}, mark)
        if keep_last is not None:
            files.drop_old(folder, keep_last)

    ranks.together(lambda: files.saying(folder, ranks.rank, complete), only=0)


class Reading:
    """A complete, verified checkpoint.

    Args:
        folder: its name.
        ranks: all that read it.
        verified: its bytes have been compared with the manifest just now.

    Raises:
        CheckpointError: it is not there, not complete, or damaged; the same on every rank.
    """

    def __init__(self, folder: Path, ranks: Ranks, verified: bool = False) -> None:
        self.ranks = ranks
        self.folder = ranks.together(lambda: files.find(folder))
        if not verified:
            shares = ranks.gather(ranks.together(lambda: files.damage(self.folder, ranks.rank, ranks.world)))
            if wrong := [what for share in shares for what in share]:
                raise CheckpointError(
                    f"checkpoint {self.folder} is damaged in {in_words(wrong)}; restore it, or load another one"
                )
        self._reader = FileSystemReader(self.folder)
        self.notes, self._metadata = ranks.together(self._opened)
        self._reader.set_up_storage_reader(self._metadata, ranks.rank == 0)

    def _opened(self) -> tuple[Notes, Metadata]:
        try:
            notes = torch.load(self.folder / files.STATE, map_location="cpu", weights_only=False)
            return notes, self._reader.read_metadata()
        except Exception as error:  # what unpickling raises is of many kinds
            raise CheckpointError(
                f"checkpoint {self.folder} cannot be opened ({type(error).__name__}: {' '.join(str(error).split())}); have the modules be there whose "
                "classes were given as extra, or load another one"
            ) from None

    def read(self, shards: Shards, place: Place | None = None) -> None:
        """Fill the tensors of shards; padding stays as it is."""
        read_shards(self._reader, self._metadata, shards, place or self.ranks.place)

    def restore_random_state(self) -> None:
        """The generators' states of the saved rank that stood where this one does; see `save`. Of a conversion, theirs stay."""
        if self.notes["random"] is None:
            return
        rank = source_rank(self.ranks.place, Grid(**self.notes["grid"]))
        set_random_state(read_random_state(self.folder, self.notes["random"], rank))


def read_shards(reader: FileSystemReader, metadata: Metadata, shards: Shards, place: Place) -> None:
    """Fill the tensors of shards from files of torch.distributed.checkpoint; padding stays as it is."""
    scratch = {name: shard for name, shard in shards.items() if not shard.tensor.is_contiguous()}
    contiguous = {name: replace(shard, tensor=shard.tensor.contiguous()) for name, shard in scratch.items()}
    planner = RegionLoadPlanner(place)
    planner.set_up_planner(shards | contiguous, metadata)
    with torch.no_grad():
        reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
        for name, shard in scratch.items():
            shard.tensor.copy_(contiguous[name].tensor)


def load(
    folder: str | os.PathLike,
    model: nn.Module,
    mesh: Mesh | None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    strict: bool = True,
) -> Any:
    """Read a checkpoint into a model on any grid; every rank of the mesh calls it.

    Weights and optimizer states are those that were saved, bit by bit, and no rank reads more than its own. Nothing is
    changed where anything does not fit. The random number generators continue on the same grid, and where as many ranks read
    different tokens (gz·gdata); otherwise all ranks take the states of rank 0.

    Args:
        folder: what `save` wrote.
        model: a model that `parallelize` split, or a serial one.
        mesh: the model's mesh; None for a serial model, with or without a process group.
        optimizer: of the saved class; parameters may be grouped in another way where their options are the same.
        scheduler: of the saved class.
        strict: refuse weights that are here or there alone; else they are left as they are, as by torch's `load_state_dict`.

    Returns:
        `extra` as it was given to `save`.

    Raises:
        CheckpointError: one sentence that names what is damaged, missing, or does not fit; the same on every rank.
    """
    ranks, names = Ranks(mesh), DealtNames(model)
    reading = Reading(Path(folder), ranks)
    if names and strict:
        require_takers(names, reading.notes, ranks)
    notes = names.notes(reading.notes, names.inward)

    def targets() -> tuple[Shards, Callable[[], None], Any]:
        shards, hand_over, schedule = model_targets(model, notes, strict), lambda: None, None
        if optimizer is not None:
            states, hand_over = optimizer_targets(optimizer, whole_pieces(model, optimizer), notes)
            shards |= states
        if scheduler is not None:
            check_scheduler(scheduler, notes)
            schedule = _schedule(model, optimizer, notes)
        return shards, hand_over, schedule

    shards, hand_over, schedule = ranks.together(targets)
    ranks.together(lambda: reading.read({names.outward(name): shard for name, shard in shards.items()}))
    hand_over()
    restore_modules(model, notes["model"], shards)
    if scheduler is not None:
        scheduler.load_state_dict(schedule)
    reading.restore_random_state()
    return notes["extra"]


def require_takers(names: DealtNames, notes: Notes, ranks: Ranks) -> None:
    """Refuse weights of a checkpoint that no rank has, as of further experts or layers; each rank knows its own alone.

    Args:
        names: this rank's.
        notes: of the checkpoint.
        ranks: all that read it.

    Raises:
        CheckpointError: there are some; the same on every rank.
    """
    listed = sorted(name for name in notes["tensors"] if name.startswith("model."))
    # A bit for each name, as there may be thousands of ranks.
    lacking = sum(1 << number for number, name in enumerate(listed) if names.inward(name) is None)
    if nobodys := reduce(and_, ranks.gather(lacking)):
        first = listed[(nobodys & -nobodys).bit_length() - 1]
        raise CheckpointError(
            f"the checkpoint has {first}, which the model has not; load it into the model that was saved"
        )


def _schedule(model: nn.Module, optimizer: torch.optim.Optimizer | None, notes: Notes) -> Any:
    if "scheduler" not in notes:
        raise CheckpointError("the checkpoint was saved without a scheduler; load it without one")
    if optimizer is None or "optimizer" not in notes:
        return notes["scheduler"]
    saved = notes["optimizer"]["groups"]
    groups = matched_groups(groups_of(optimizer, whole_pieces(model, optimizer)), saved)
    return regrouped(notes["scheduler"], groups, len(saved))
