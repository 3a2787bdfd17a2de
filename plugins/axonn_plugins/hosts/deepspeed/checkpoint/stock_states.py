"""The optimizer's state as a stock DeepSpeed-MoE engine on as many ranks would have saved it, read from TED's own files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import CLIP_GRAD
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch import Tensor

from axonn_plugins.hosts.deepspeed.checkpoint.state import EngineState
from axonn_plugins.hosts.deepspeed.checkpoint.stock_plan import Flat, Group, stock_groups
from axonn_tp.checkpoint.dealt import DealtNames
from axonn_tp.checkpoint.optimizer import Pieces, options_of
from axonn_tp.checkpoint.planner import Place, Shard
from axonn_tp.checkpoint.training import Reading
from axonn_tp.grid.layout import Layout


def script_groups(pieces: Pieces) -> list[list[str]]:
    """Names of the optimizer's parameters by group, as the script makes the groups.

    Args:
        pieces: where the optimizer keeps the states.
    """
    return [[piece.name for piece in group] for group in pieces]


@dataclass
class StockStates:
    """The optimizer states in stock DeepSpeed's files.

    Args:
        engine: a `TedEngine`, each of whose ranks becomes a data rank.
        state: its.
        reading: what it saved.
        world: data ranks.
    """

    engine: Any
    state: EngineState
    reading: Reading
    world: int

    def __post_init__(self) -> None:
        self.shapes = {
            piece.name: piece.layout.serial_shape for group in self.state.pieces for piece in group if piece.name
        }
        numel = {name: math.prod(shape) for name, shape in self.shapes.items()}
        self.experts = 1 if self.engine.groups is None else self.engine.groups.topology.expert
        self.groups: list[Group] = []
        for group in stock_groups(script_groups(self.state.pieces), numel):
            dealt = self.engine._own_stage and self.engine.zero_round_robin_gradients()
            self.groups.append(group.dealt(self._count(group)) if dealt else group)

    def _count(self, group: Group) -> int:
        return self.world // self.experts if group.experts else self.world

    @property
    def param_shapes(self) -> list[dict[str, torch.Size]]:
        """The parameters that are in the files, by group."""
        return [{name: torch.Size(self.shapes[name]) for name in group.names} for group in self.groups]

    def plain(self, rank: int) -> dict[str, Any]:
        """The state_dict of torch's optimizer on an expert rank (ZeRO-0)."""
        states: dict[int, dict[str, Any]] = {}
        shards: dict[str, Shard] = {}
        for number, name in enumerate(chain.from_iterable(group.names for group in self.groups)):
            layout, outward = Layout(self.shapes[name]), self._outward(name, rank)
            state = self._numbers(outward)
            for key in self._keys(outward):
                state[key] = self._empty(f"optimizer.{outward}.{key}", math.prod(layout.shape)).view(layout.shape)
                shards[f"optimizer.{outward}.{key}"] = Shard(state[key], layout)
            if state:
                states[number] = state
        self.reading.read(shards, Place())
        return {"state": states, "param_groups": self._param_groups([len(group.names) for group in self.groups])}

    def partitions(self, rank: int) -> dict[str, Any]:
        """The state that the ZeRO-1 or 2 optimizer of a rank saves."""
        knows = hasattr(self.engine, "zero_parameter_alignment")
        alignment = knows and self.engine.zero_parameter_alignment()
        flats, masters, states, shards = [], [], {}, {}
        for number, group in enumerate(self.groups):
            sizes = [math.prod(self.shapes[name]) for name in group.names]
            width = self.state.parameters[group.names[0]].element_size()
            flat = Flat.aligned(sizes, self._count(group), 16 // math.gcd(16, width) if alignment else 1)
            outward = [self._outward(name, rank) for name in group.names]
            partition = rank // self.experts if group.experts else rank
            made = {"master": self._empty(self._master(outward[0]), flat.size)}
            made |= {key: self._empty(f"optimizer.{outward[0]}.{key}", flat.size) for key in self._keys(outward[0])}
            for place, start, length, at in flat.pieces(partition):
                layout = Layout(self.shapes[group.names[place]])
                for key, tensor in made.items():
                    full = self._master(outward[place]) if key == "master" else f"optimizer.{outward[place]}.{key}"
                    shards[full] = Shard(tensor.narrow(0, at, length), layout, start)
            masters.append(made.pop("master")[: flat.size - flat.padding(partition)])
            if state := self._numbers(outward[0]) | made:
                states[number] = state
            flats.append((flat, partition))
        self.reading.read(shards, Place())
        engine = self.engine
        saved: dict[str, Any] = {
            "loss_scaler": engine.optimizer.loss_scaler or LossScaler(1.0),
            "dynamic_loss_scale": engine.optimizer.dynamic_loss_scale,
            "overflow": engine.optimizer.overflow,
            CLIP_GRAD: engine.gradient_clipping(),
            "zero_stage": ZeroStageEnum(engine._own_stage),
            "ds_version": deepspeed.__version__,
        }
        if knows:
            saved["param_alignment_paddings"] = [list(flat.gaps) for flat, _ in flats]
        return saved | {
            "base_optimizer_state": {"state": states, "param_groups": self._param_groups([1] * len(self.groups))},
            "single_partition_of_fp32_groups": masters,
            "group_paddings": [flat.padding(partition) for flat, partition in flats],
            "partition_count": [flat.count for flat, _ in flats],
        }

    def _outward(self, name: str, rank: int) -> str:
        names = self.state.names
        assert isinstance(names, DealtNames)
        return names.outward(name, rank % self.experts)

    def _master(self, name: str) -> str:
        """Where the master is: it was stored where it is wider than the weight."""
        wide = f"optimizer.{name}.master"
        return wide if wide in self.reading.notes["tensors"] else f"model.{name}"

    def _keys(self, name: str) -> Sequence[str]:
        return self.reading.notes["optimizer"]["tensors"].get(name, [])

    def _numbers(self, name: str) -> dict[str, Any]:
        return dict(self.reading.notes["optimizer"]["others"].get(name, {}))

    def _empty(self, full: str, size: int) -> Tensor:
        return torch.zeros(size, dtype=self.reading.notes["tensors"][full][1])

    def _param_groups(self, lengths: list[int]) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        known = self.engine.optimizer.param_groups
        for group, length in zip(self.groups, lengths, strict=True):
            first = sum(len(g["params"]) for g in made)
            kind = {"moe": True, "name": f"ep_size_{self.experts}"} if group.experts else {"moe": False}
            made.append({**options_of(known[group.source]), **kind, "params": list(range(first, first + length))})
        return made


def save_states(engine: Any, folder: Path, portable: Path, state: EngineState) -> list[dict[str, torch.Size]] | None:
    """Write stock's files of optimizer states, where its ZeRO-1 and 2, or a torch optimizer, has such; every rank calls it.

    Args:
        engine: a `TedEngine`.
        folder: where they go.
        portable: what was saved.
        state: of the engine.

    Returns:
        Shapes of the parameters by group where ZeRO has partitions.
    """
    if engine._owns and not engine._own_stage:
        return None
    rank, world = dist.get_rank(), dist.get_world_size()
    stock = StockStates(engine, state, Reading(portable, state.ranks, verified=True), world)
    if engine._own_stage:
        saved = {"optimizer_state_dict": stock.partitions(rank), "ds_config": engine._config.axonn_raw}
        saved["ds_version"] = deepspeed.__version__
        engine.checkpoint_engine.save(
            saved, engine._get_rank_zero_ckpt_name(folder.parent, folder.name, 0, rank, engine.bfloat16_enabled())
        )
        return stock.param_shapes
    if rank < stock.experts:
        file = folder / f"expp_rank_{rank}_mp_rank_00_optim_states.pt"
        engine.checkpoint_engine.save({"optimizer": stock.plain(rank)}, str(file))
    return None
