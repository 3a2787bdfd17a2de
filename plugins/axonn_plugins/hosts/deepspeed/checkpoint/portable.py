"""An engine's state by the serial model's names, so that it resumes on another grid or another ZeRO stage.

Under ZeRO-1 and 2 a rank keeps float32 masters and moments of a flat partition: parts of several parameters' shards.
Masters are stored where they are wider than the weights; otherwise they are equal to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from axonn_plugins.hosts.deepspeed.optim.by_layout import LayoutZeroOptimizer, MixedPrecisionOptimizer
from axonn_tp import layout_of
from axonn_tp.checkpoint.dealt import DealtNames, merged
from axonn_tp.checkpoint.optimizer import (
    Piece,
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
    """What is saved of an engine, besides DeepSpeed's own files.

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
        if self.own is not None:
            self.optimizer, self.pieces = self.own.view, whole_pieces(self.module, self.own.view)
        else:
            self.optimizer, self.pieces = _pieces(engine.optimizer, self.module)

    def _masters(self, wider: bool) -> Iterable[Piece]:
        """Pieces of masters, those that are wider than the weights or those that are equal to them."""
        for piece in chain.from_iterable(self.pieces):
            parameter = self.parameters[piece.name]
            if piece.holder is not parameter and (piece.holder.dtype != parameter.dtype) == wider:
                yield piece

    def _wide_masters(self) -> Shards:
        if self.own is not None:
            return {f"optimizer.{name}.master": shard for name, shard in self.own.masters.items()}
        return {f"optimizer.{piece.name}.master": piece.shard(piece.holder.detach()) for piece in self._masters(True)}

    def collect(self, client_state: dict[str, Any]) -> tuple[Shards, Notes]:
        """What this rank holds.

        Raises:
            CheckpointError: the optimizer's states cannot be split anew; the same on every rank.
        """
        if self.own is not None:
            self.own.collect()
        shards, notes = self.ranks.together(lambda: self._collect(client_state))
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

    def _collect(self, client_state: dict[str, Any]) -> tuple[Shards, Notes]:
        shards, model = model_state(self.module)
        notes: Notes = {"model": model, "extra": client_state}
        notes["counters"] = {name: getattr(self.engine, name) for name in _COUNTERS}
        if self.optimizer is not None:
            states, notes["optimizer"] = optimizer_state(self.optimizer, self.pieces)
            shards |= states | self._wide_masters()
        if self.engine.lr_scheduler is not None:
            notes["scheduler"] = self.engine.lr_scheduler.state_dict()
        if (scaler := _scaler(self.engine)) is not None:
            notes["loss_scaler"] = dict(vars(scaler))
        return shards, notes

    def write(self, folder: Path, shards: Shards, notes: Notes) -> None:
        """Write what `collect` returned."""
        write(folder, shards, notes, self.ranks)

    def load(self, reading: Any, states: bool, schedule: bool, counters: bool) -> dict[str, Any]:
        """Read what an engine on any grid wrote.

        Args:
            reading: the checkpoint, a `Reading` or what has its notes and its `read`.
            states: with the optimizer's states and the loss scale.
            schedule: with the scheduler's state.
            counters: with the counts of steps and samples.

        Returns:
            The client state.

        Raises:
            CheckpointError: one sentence, the same on every rank.
        """
        notes, states = reading.notes, states and self.optimizer is not None
        if self.names is not None:
            notes = self.names.notes(notes, self.names.inward)
        if self.own is not None:
            self.own.take_masks(reading)
        shards, hand_over = self.ranks.together(lambda: self._targets(notes, states))
        self.ranks.together(lambda: reading.read(self._outward(shards)))
        hand_over()
        restore_modules(self.module, notes["model"])
        if states and self.own is not None:
            self.own.hand_over()
            self._restore_scale(notes.get("loss_scaler", {}))
        elif states:
            self._copy_equal_masters()
            self._restore_scale(notes.get("loss_scaler", {}))
        elif hasattr(self.engine.optimizer, "refresh_fp32_params"):
            self.engine.optimizer.refresh_fp32_params()
        if self.own is not None and states:
            self.own.composition.load_state_dict(notes.get("systems", {}))
        if counters:
            for name, value in notes["counters"].items():
                setattr(self.engine, name, value)
        if schedule and self.engine.lr_scheduler is not None and "scheduler" in notes:
            self.engine.lr_scheduler.load_state_dict(self._schedule(notes))
        return notes["extra"]

    def _targets(self, notes: Notes, states: bool) -> tuple[Shards, Callable[[], None]]:
        shards = model_targets(self.module, notes)
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

    @torch.no_grad()
    def _copy_equal_masters(self) -> None:
        for piece in self._masters(False):
            weights = self.parameters[piece.name].view(-1).narrow(0, piece.start, piece.length)
            piece.holder.view(-1).narrow(0, piece.offset, piece.length).copy_(weights)
        # DeepSpeed hands out views of the moments, which are new tensors now.
        if getattr(self.engine.optimizer, "_hp_optimizer_states_linked", False):
            self.engine.optimizer._hp_optimizer_states_linked = False

    def _schedule(self, notes: Notes) -> Any:
        if self.optimizer is None or "optimizer" not in notes:
            return notes["scheduler"]
        saved = notes["optimizer"]["groups"]
        return regrouped(notes["scheduler"], matched_groups(groups_of(self.optimizer, self.pieces), saved), len(saved))


def _scaler(engine: DeepSpeedEngine) -> Any:
    return getattr(engine.optimizer, "loss_scaler", None)


def _pieces(optimizer: Any, module: nn.Module) -> tuple[torch.optim.Optimizer | None, Pieces]:
    """The basic optimizer inside DeepSpeed's, and where it keeps its states."""
    if optimizer is None:
        return None, []
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    if isinstance(optimizer, LayoutZeroOptimizer):
        return optimizer.optimizer, _partitions(optimizer, names)
    if isinstance(optimizer, MixedPrecisionOptimizer):
        return optimizer.optimizer, [
            [Piece(names[id(p)], layout_of(p), holder, 0, holder.numel()) for p, holder in group]
            for group in optimizer.pairs_by_group()
        ]
    return optimizer, whole_pieces(module, optimizer)


def _partitions(optimizer: LayoutZeroOptimizer, names: dict[int, str]) -> Pieces:
    """The parts of parameters in this rank's partition of each flattened group."""
    found: Pieces = []
    for number, members in enumerate(optimizer.round_robin_bit16_groups):
        partition = optimizer.single_partition_of_fp32_groups[number]
        size = partition.numel()
        begin = size * dist.get_rank(group=optimizer.real_dp_process_group[number])
        found.append([])
        for parameter, offset in zip(members, _offsets(optimizer, number), strict=True):
            low, high = max(offset, begin), min(offset + parameter.numel(), begin + size)
            at, length, start = (low - begin, high - low, low - offset) if low < high else (0, 0, 0)
            name, layout = names[id(parameter)], layout_of(parameter)
            found[-1].append(Piece(name, layout, partition, at, length, start))
    return found


def _offsets(optimizer: LayoutZeroOptimizer, group: int) -> list[int]:
    """Where each parameter begins in the flattened group; DeepSpeed before 0.19 does not say, and leaves no gaps."""
    if hasattr(optimizer, "round_robin_bit16_offsets"):
        return optimizer.round_robin_bit16_offsets[group]
    sizes = [parameter.numel() for parameter in optimizer.round_robin_bit16_groups[group]]
    return [sum(sizes[:place]) for place in range(len(sizes))]
