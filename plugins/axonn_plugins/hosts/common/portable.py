"""A run's state by the serial model's names, so that it resumes on another grid, another ZeRO stage or under another host.

Float32 masters are stored where they are wider than the weights; otherwise they are equal to them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from axonn_tp import Mesh
from axonn_tp.checkpoint import CheckpointError, Saving, files
from axonn_tp.checkpoint.dealt import DealtNames
from axonn_tp.checkpoint.merging import merged
from axonn_tp.checkpoint.optimizer import (
    Pieces,
    check_scheduler,
    groups_of,
    matched_groups,
    optimizer_state,
    optimizer_targets,
    regrouped,
    scheduler_state,
    whole_pieces,
)
from axonn_tp.checkpoint.ranks import Ranks
from axonn_tp.checkpoint.state import (
    Notes,
    Shards,
    check_tensors,
    is_frozen,
    model_state,
    model_targets,
    restore_modules,
)
from axonn_tp.checkpoint.training import require_takers, write

if TYPE_CHECKING:
    from axonn_plugins.hosts.common.composition import Composition
    from axonn_plugins.hosts.common.own_states import OwnState

PORTABLE = "axonn"
"""The folder of these files in that of a checkpoint which has a host's own files, too."""


def portable_in(folder: Path) -> Path | None:
    """The folder in which a checkpoint has its files by the serial model's names, a subfolder or itself; None where it has none."""
    if (folder / PORTABLE).is_dir():
        return folder / PORTABLE
    return folder if (folder / files.STATE).is_file() else None


class PortableState(ABC):
    """The state of a run: its weights, and the optimizer's states, schedule and counts.

    Args:
        model: this rank's part.
        mesh: of it.
        optimizer: None where there is none.
        composition: where the optimizer's states are ours.
        scheduler: of the learning rate; None: there is none.
        names: of experts and layers, where ranks have different ones.
        apart: whether the ranks of other stages have other parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        optimizer: Any,
        composition: Composition | None,
        scheduler: Any = None,
        names: DealtNames | None = None,
        apart: bool = False,
    ) -> None:
        self.module, self.held, self.scheduler, self.names = model, optimizer, scheduler, names
        self.ranks = Ranks(mesh, apart)
        self.parameters = dict(self.module.named_parameters())
        self.own: OwnState | None = None
        if composition is not None:
            # Only here is `samo` needed, a name that a user's folder may have.
            from axonn_plugins.hosts.common.own_states import OwnState

            self.own = OwnState(model, mesh, optimizer, composition)
        self.optimizer: torch.optim.Optimizer | None = optimizer if self.own is None else self.own.view
        self.pieces = [] if self.optimizer is None else whole_pieces(self.module, self.optimizer)

    # What a host knows better

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Counts of steps, ``global_steps`` at least."""

    @abstractmethod
    def take_counters(self, saved: dict[str, int]) -> None:
        """Go on with counts of `counters`, of any host's."""

    def parts(self) -> dict[str, Any]:
        """Parts of the host that know how far they are, by name, each with `state_dict` and `load_state_dict`."""
        return {}

    @abstractmethod
    def scale(self) -> Notes:
        """Notes on the loss scale; nothing where there is none."""

    @abstractmethod
    def take_scale(self, notes: Notes) -> None:
        """Go on with the loss scale in a checkpoint's notes, of any host's."""

    def refresh(self) -> None:
        """Weights alone have been read: have the float32 ones be these."""
        if self.own is not None:
            self.held.refresh_masters()

    # Saving

    def _wide_masters(self) -> Shards:
        held = {} if self.own is None else self.own.masters
        return {f"optimizer.{name}.master": shard for name, shard in held.items()}

    def collect(self, extra: Any, frozen: bool = True) -> tuple[Shards, Notes]:
        """Collect this rank's part.

        Args:
            extra: what else is kept.
            frozen: with parameters that are not trained.

        Raises:
            CheckpointError: the optimizer's states cannot be split anew; the same on every rank.
        """
        pieces = self.pieces if self.own is None else self.own.collect()
        shards, notes = self.ranks.together(lambda: self._collect(extra, pieces, frozen))
        if self.names is not None:
            notes = merged(self.ranks, self.names.notes(notes, self.names.outward))
        shards = self._outward(shards)
        if self.own is not None:
            masks, notes["samo"] = self.own.masks()
            shards |= masks
            notes["systems"] = self.own.composition.state_dict()
        return shards, notes

    def _outward(self, shards: Shards) -> Shards:
        return shards if self.names is None else {self.names.outward(name): shard for name, shard in shards.items()}

    def _collect(self, extra: Any, pieces: Pieces, frozen: bool) -> tuple[Shards, Notes]:
        shards, model = model_state(self.module)
        if not frozen:
            shards = {name: shard for name, shard in shards.items() if not is_frozen(shard.tensor)}
            model["aliases"] = {name: known for name, known in model["aliases"].items() if f"model.{known}" in shards}
        notes: Notes = {"model": model, "extra": extra, "counters": self.counters(), "frozen": frozen}
        if self.optimizer is not None:
            states, notes["optimizer"] = optimizer_state(self.optimizer, pieces)
            shards |= states | self._wide_masters()
        if self.scheduler is not None:
            notes |= scheduler_state(self.scheduler)
        notes["data"] = {name: part.state_dict() for name, part in self.parts().items()}
        return shards, notes | self.scale()

    def write(
        self, folder: Path, shards: Shards, notes: Notes, asynchronous: bool = False, keep_last: int | None = None
    ) -> Saving | None:
        """Write what `collect` returned; see `axonn_tp.checkpoint.save`."""
        return write(folder, shards, notes, self.ranks, asynchronous, keep_last)

    # Loading

    def load(self, reading: Any, states: bool, schedule: bool, counters: bool, strict: bool = True) -> Any:
        """Read what a run on any grid wrote.

        Args:
            reading: the checkpoint, a `Reading` or what has its notes and its `read`.
            states: with the optimizer's states and the loss scale.
            schedule: with the scheduler's state.
            counters: with the counts of steps and samples, and how far curricula are.
            strict: refuse weights that are here or there alone.

        Returns:
            What else was saved.

        Raises:
            CheckpointError: one sentence, the same on every rank.
        """
        notes, states = reading.notes, states and self.optimizer is not None
        if self.names is not None:
            if strict:
                require_takers(self.names, notes, self.ranks)
            notes = self.names.notes(notes, self.names.inward)
        shards, hand_over = self.ranks.together(lambda: self._targets(notes, states, strict))
        schedule = schedule and self.scheduler is not None and "scheduler" in notes
        resumed = self.ranks.together(lambda: self._schedule(notes, states)) if schedule else None
        if self.own is not None:
            self.own.take_masks(reading.notes, lambda parts: self.ranks.together(lambda: reading.read(parts)))
        self.ranks.together(lambda: reading.read(self._outward(shards)))
        hand_over()
        restore_modules(self.module, notes["model"], shards)
        if states and self.own is not None:
            self.own.hand_over()
            self.take_scale(notes)
            self.own.composition.load_state_dict(notes.get("systems", {}))
        else:
            self.refresh()
        if counters:
            self.take_counters(notes.get("counters", {}))
            for name, part in self.parts().items():
                if (saved := notes.get("data", {}).get(name)) is not None:
                    part.load_state_dict(saved)
        if schedule:
            self.scheduler.load_state_dict(resumed)
        return notes["extra"]

    def _targets(self, notes: Notes, states: bool, strict: bool) -> tuple[Shards, Callable[[], None]]:
        # Weights alone may be of another type.
        if strict and not notes.get("frozen", True):
            raise CheckpointError(
                "the checkpoint was saved with exclude_frozen_parameters = True; pass load_module_strict=False, which leaves frozen parameters as they are"
            )
        shards = model_targets(self.module, notes, strict, converted=not states)
        if not states:
            return shards, lambda: None
        assert self.optimizer is not None
        if self.own is not None:
            self.own.make_masters(notes)
        moments, hand_over = optimizer_targets(self.optimizer, self.pieces, notes)
        masters = self._wide_masters()
        check_tensors(masters, notes["tensors"])
        return shards | moments | masters, hand_over

    def _schedule(self, notes: Notes, states: bool) -> Any:
        check_scheduler(self.scheduler, notes)
        if self.optimizer is None or "optimizer" not in notes:
            return notes["scheduler"]
        saved, here = notes["optimizer"]["groups"], groups_of(self.optimizer, self.pieces)
        if not states and len(here) == len(saved):  # as many may be of other parameters then
            return notes["scheduler"]
        return regrouped(notes["scheduler"], matched_groups(here, saved), len(saved))
