"""An engine's state by the serial model's names, so that it resumes on another grid or another ZeRO stage.

Float32 masters are stored where they are wider than the weights; otherwise they are equal to them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from axonn_plugins.hosts.deepspeed.data_efficiency import parts_with_state
from axonn_tp.checkpoint import CheckpointError
from axonn_tp.checkpoint.dealt import DealtNames
from axonn_tp.checkpoint.merging import merged
from axonn_tp.checkpoint.optimizer import (
    Pieces,
    groups_of,
    matched_groups,
    optimizer_state,
    optimizer_targets,
    regrouped,
    whole_pieces,
)
from axonn_tp.checkpoint.ranks import Ranks
from axonn_tp.checkpoint.state import Notes, Shards, check_tensors, model_state, model_targets, restore_modules
from axonn_tp.checkpoint.training import write

if TYPE_CHECKING:
    from axonn_plugins.hosts.deepspeed.checkpoint.own_states import OwnState

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class PortableState:
    """The state of an engine that is saved besides DeepSpeed's own files.

    Args:
        engine: one of ours.
        names: of experts and layers, where ranks have different ones.
        apart: whether the ranks of other stages have other parameters.
    """

    def __init__(self, engine: DeepSpeedEngine, names: DealtNames | None = None, apart: bool = False) -> None:
        self.engine, self.names = engine, names
        self.module: nn.Module = engine.module
        self.ranks = Ranks(engine.mesh, apart)
        self.parameters = dict(self.module.named_parameters())
        self.own: OwnState | None = None
        if getattr(engine, "composition", None) is not None:
            from axonn_plugins.hosts.deepspeed.checkpoint.own_states import OwnState

            self.own = OwnState(engine)
        self.optimizer: torch.optim.Optimizer | None
        self.optimizer = engine.optimizer if self.own is None else self.own.view
        self.pieces = [] if self.optimizer is None else whole_pieces(self.module, self.optimizer)

    def _wide_masters(self) -> Shards:
        held = {} if self.own is None else self.own.masters
        return {f"optimizer.{name}.master": shard for name, shard in held.items()}

    def collect(self, client_state: dict[str, Any]) -> tuple[Shards, Notes]:
        """Collect this rank's part.

        Raises:
            CheckpointError: the optimizer's states cannot be split anew; the same on every rank.
        """
        pieces = self.pieces if self.own is None else self.own.collect()
        shards, notes = self.ranks.together(lambda: self._collect(client_state, pieces))
        if self.names is not None:
            notes = merged(self.ranks.gather(self.names.notes(notes, self.names.outward)))
        shards = self._outward(shards)
        if self.own is not None:
            masks, notes["samo"] = self.own.masks()
            shards |= masks
            notes["systems"] = self.own.composition.state_dict()
        return shards, notes

    def _outward(self, shards: Shards) -> Shards:
        return shards if self.names is None else {self.names.outward(name): shard for name, shard in shards.items()}

    def _collect(self, client_state: dict[str, Any], pieces: Pieces) -> tuple[Shards, Notes]:
        shards, model = model_state(self.module)
        notes: Notes = {"model": model, "extra": client_state}
        notes["counters"] = {name: getattr(self.engine, name) for name in _COUNTERS}
        if self.optimizer is not None:
            states, notes["optimizer"] = optimizer_state(self.optimizer, pieces)
            shards |= states | self._wide_masters()
        if self.engine.lr_scheduler is not None:
            notes["scheduler"] = self.engine.lr_scheduler.state_dict()
        notes["data"] = {name: part.state_dict() for name, part in parts_with_state(self.engine).items()}
        if (scaler := _scaler(self.engine)) is not None:
            notes["loss_scaler"] = dict(vars(scaler))
        return shards, notes

    def write(self, folder: Path, shards: Shards, notes: Notes) -> None:
        """Write what `collect` returned."""
        write(folder, shards, notes, self.ranks)

    def load(self, reading: Any, states: bool, schedule: bool, counters: bool, strict: bool = True) -> dict[str, Any]:
        """Read what an engine on any grid wrote.

        Args:
            reading: the checkpoint, a `Reading` or what has its notes and its `read`.
            states: with the optimizer's states and the loss scale.
            schedule: with the scheduler's state.
            counters: with the counts of steps and samples, and how far curricula are.
            strict: refuse weights that are here or there alone.

        Returns:
            The client state.

        Raises:
            CheckpointError: one sentence, the same on every rank.
        """
        notes, states = reading.notes, states and self.optimizer is not None
        if schedule and self.engine.lr_scheduler is not None and "scheduler" not in notes:
            raise CheckpointError(
                "the checkpoint was saved without a schedule of the learning rate, and this run has one; pass load_lr_scheduler_states=False to have "
                "it begin anew"
            )
        if self.names is not None:
            notes = self.names.notes(notes, self.names.inward)
        if self.own is not None:
            self.own.take_masks(reading)
        shards, hand_over = self.ranks.together(lambda: self._targets(notes, states, strict))
        self.ranks.together(lambda: reading.read(self._outward(shards)))
        hand_over()
        restore_modules(self.module, notes["model"])
        if states and self.own is not None:
            self.own.hand_over()
            self._restore_scale(notes.get("loss_scaler", {}))
        elif hasattr(self.engine.optimizer, "refresh_fp32_params"):
            self.engine.optimizer.refresh_fp32_params()
        if self.own is not None and states:
            self.own.composition.load_state_dict(notes.get("systems", {}))
        if counters:
            for name, value in notes["counters"].items():
                setattr(self.engine, name, value)
            for name, part in parts_with_state(self.engine).items():
                if (saved := notes.get("data", {}).get(name)) is not None:
                    part.load_state_dict(saved)
        if schedule and self.engine.lr_scheduler is not None and "scheduler" in notes:
            self.engine.lr_scheduler.load_state_dict(self._schedule(notes, states))
        return notes["extra"]

    def _targets(self, notes: Notes, states: bool, strict: bool) -> tuple[Shards, Callable[[], None]]:
        # Weights alone may be of another type.
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

    def _restore_scale(self, saved: dict[str, Any]) -> None:
        scaler = _scaler(self.engine)
        if scaler is not None and vars(scaler).keys() == saved.keys():  # else the other one was static, or dynamic
            vars(scaler).update(saved)

    def _schedule(self, notes: Notes, states: bool) -> Any:
        if self.optimizer is None or "optimizer" not in notes:
            return notes["scheduler"]
        saved, here = notes["optimizer"]["groups"], groups_of(self.optimizer, self.pieces)
        if not states and len(here) == len(saved):  # as many may be of other parameters then
            return notes["scheduler"]
        return regrouped(notes["scheduler"], matched_groups(here, saved), len(saved))


def _scaler(engine: DeepSpeedEngine) -> Any:
    return getattr(engine.optimizer, "loss_scaler", None)
