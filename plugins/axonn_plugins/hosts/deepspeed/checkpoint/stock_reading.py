"""A checkpoint that a stock engine saved at ZeRO-0, 1 or 2, dense or of DeepSpeed-MoE, to be read into shards of any grid and degrees."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from axonn_plugins.hosts.deepspeed.checkpoint.state import EngineState
from axonn_plugins.hosts.deepspeed.checkpoint.stock_plan import EXPERT, Flat, Group, renumbered, stock_groups
from axonn_plugins.hosts.deepspeed.checkpoint.stock_refusals import STATES, WEIGHTS_ALONE, check_scale
from axonn_plugins.hosts.deepspeed.checkpoint.stock_states import script_groups
from axonn_plugins.hosts.deepspeed.ted.layers import TedMoE
from axonn_tp.checkpoint import CheckpointError
from axonn_tp.checkpoint.dealt import DealtNames
from axonn_tp.checkpoint.optimizer import options_of
from axonn_tp.checkpoint.state import Notes, Shards, model_state
from axonn_tp.grid.layout import layout_of
from axonn_tp.layers.exports import as_shards

OPTIMIZER = "mp_rank_00_optim_states.pt"
_OWN = {"module", "optimizer", "lr_scheduler", "global_steps", "global_samples", "skipped_steps", "ds_config"}
_OWN |= {"dp_world_size", "mp_world_size", "num_experts", "buffer_names", "ds_version", "data_sampler"}
_OWN |= {"random_ltd", "sparse_tensor_module_names", "param_shapes", "frozen_param_shapes", "shared_params"}
_OWN |= {"frozen_param_fragments", "ds_autoep_layers", "universal_checkpoint_info", "checkpoint_parallel_dimensions"}
_MASTER = "master"
_EXTRA = "_extra_state"
_MARKS = {"betas", "momentum", "alpha", "rho", "lr_decay"}
"""Options that tell kinds of optimizers apart: DeepSpeed's files do not name a class."""


_File = Callable[[int], dict[str, Any]]
# By key, shapes and types of what there is for each element, and the rest.
_State = tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], dict[str, Any]]


@dataclass
class _Group:
    """Stock's group of parameters.

    Attributes:
        names: of its parameters, as every rank numbers its own experts.
        ranks: that have different experts, where the group has experts.
        options: as learning rates.
        state: of the parameter at a place, of an expert rank.
        whole: a state's tensor.
    """

    names: list[str]
    ranks: int
    options: Notes
    state: Callable[[int, int], _State]
    whole: Callable[[int, int, str], Tensor]


class StockReading:
    """Reads stock DeepSpeed's files as `axonn_tp.checkpoint.training.Reading` reads ours; knows of the experts of this rank alone.

    Args:
        engine: one of ours whose weights are split.
        state: its.
        folder: the checkpoint.
        states: with the optimizer's states.

    Raises:
        CheckpointError: a file, or a tensor in it, is missing or of another kind; the same on every rank.
    """

    def __init__(self, engine: Any, state: EngineState, folder: Path, states: bool) -> None:
        self.engine, self.state, self.folder = engine, state, folder
        self.names = DealtNames(engine.module) if state.names is None else state.names
        # On disk until a part is looked at, and not all files at once.
        self._load = lru_cache(maxsize=8)(partial(torch.load, map_location="cpu", weights_only=False, mmap=True))
        self._wholes: dict[str, Callable[[], Tensor]] = {}
        self.notes: Notes = state.ranks.together(lambda: self._notes(states))

    def read(self, shards: Shards) -> None:
        """Fill the tensors of shards."""
        with torch.no_grad():
            for name, shard in shards.items():
                shard.fill(self._wholes[name](), self.state.ranks.place)

    def _file(self, name: str) -> dict[str, Any]:
        try:
            return self._load(self.folder / name)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{self.folder / name} cannot be read: {str(error).splitlines()[0]}") from None

    def _notes(self, states: bool) -> Notes:
        saved = self._file(STATES)
        whole: dict[str, Tensor] = dict(saved["module"])
        for file in self._expert_files():
            whole |= self._file(file)
        shards, _ = model_state(self.engine.module)
        tensors = {}
        for local, shard in shards.items():
            name = self.names.outward(local)
            if (tensor := whole.get(name.removeprefix("model."))) is not None:
                # Weights alone may be of another type.
                tensors[name] = tuple(tensor.shape), tensor.dtype if states else shard.tensor.dtype
                self._wholes[name] = partial(whole.__getitem__, name.removeprefix("model."))
        for name in self._strangers(whole):
            tensors[f"model.{name}"] = tuple(whole[name].shape), whole[name].dtype
        modules = {name: value for name, value in whole.items() if name.endswith(_EXTRA)}
        notes = {"model": {"aliases": {}, "modules": modules}, "tensors": tensors}
        notes["extra"] = {key: value for key, value in saved.items() if key not in _OWN}
        notes["counters"] = {key: saved[key] for key in ("global_steps", "global_samples", "skipped_steps")}
        notes["data"] = {key: saved.get(key) for key in ("data_sampler", "random_ltd")}
        if saved["lr_scheduler"] is not None:
            notes["scheduler"] = saved["lr_scheduler"]
        if states and self.state.optimizer is not None:
            notes |= self._optimizer(saved, tensors)
        return notes

    def _strangers(self, whole: dict[str, Any]) -> list[str]:
        """Weights in the checkpoint that the model has not, and that no other rank has."""
        with as_shards():
            own = self.engine.module.state_dict(keep_vars=True).keys()
        inward = {name: self.names.inward(name) for name in whole}
        return [
            name for name, here in inward.items() if here is not None and here not in own and not name.endswith(_EXTRA)
        ]

    def _expert_files(self) -> list[str]:
        """Files with this rank's experts."""
        layers = [layer for layer in self.engine.module.modules() if isinstance(layer, TedMoE)]
        files = []
        for number, layer in enumerate(layers):
            first = layer.groups.rank("expert") * len(layer.local)
            # A layer whose experts have no weights has no files.
            if any(True for _ in layer.local.parameters()):
                files += [f"layer_{number}_expert_{first + place}_{STATES}" for place in range(len(layer.local))]
        return files

    def _optimizer(self, saved: dict[str, Any], tensors: dict[str, Any]) -> Notes:
        zero = list(self.folder.glob(f"*zero_pp_rank_0_{OPTIMIZER}"))
        groups = self._partitioned(saved, zero[0].name) if zero else self._plain(saved)
        self._check_kind(groups[0].options)
        own = {self.names.outward(name) for name in self.state.parameters}
        counted: dict[str, set[str]] = {}
        for found in (EXPERT.fullmatch(name) for group in groups for name in group.names):
            if found is not None:
                counted.setdefault(found[1], set()).add(found[2])
        notes: Notes = {"class": type(self.state.optimizer).__name__, "groups": [], "tensors": {}, "others": {}}
        for group in groups:
            members = []
            for place, name in enumerate(group.names):
                expert, ranks = EXPERT.fullmatch(name), [(0, name)]
                if expert is not None:
                    before, number, after = expert.groups()
                    every = [(r, int(number) + r * len(counted[before])) for r in range(group.ranks)]
                    ranks = [(r, full) for r, n in every if (full := f"{before}{n}{after}") in own]
                for rank, full in ranks:
                    members.append(full)
                    elements, numbers = group.state(place, rank)
                    # A number in DeepSpeed's own Adam, which would not be counted on in torch's.
                    if isinstance(numbers.get("step"), int):
                        numbers["step"] = torch.tensor(float(numbers["step"]))
                    notes["others"][full] = numbers
                    for key, (shape, dtype) in elements.items():
                        tensors[f"optimizer.{full}.{key}"] = shape, dtype
                        self._wholes[f"optimizer.{full}.{key}"] = partial(group.whole, place, rank, key)
                    notes["tensors"][full] = [key for key in elements if key != _MASTER]
            notes["groups"].append({"params": members, "options": group.options})
        made: Notes = {"optimizer": notes}
        if zero:
            # BF16_Optimizer has none.
            scaler = self._file(zero[0].name)["optimizer_state_dict"].get("loss_scaler")
            made["loss_scaler"] = {} if scaler is None else dict(vars(scaler))
        elif "cur_scale" in (known := saved.get("optimizer") or {}):
            ours = vars(getattr(self.engine.optimizer, "loss_scaler", None) or SimpleNamespace())
            if ("scale_window" in ours) == ("scale_window" in known):
                made["loss_scaler"] = {key: known.get(key, value) for key, value in ours.items()}
        return made

    def _check_kind(self, options: Notes) -> None:
        assert self.state.optimizer is not None
        here = self.state.optimizer.param_groups[0]
        if _MARKS & here.keys() != _MARKS & options.keys():
            raise CheckpointError(
                f"the optimizer in {self.folder} has {', '.join(sorted(_MARKS & options.keys())) or 'no momentum'} and "
                f"{type(self.state.optimizer).__name__} has {', '.join(sorted(_MARKS & here.keys())) or 'none'}; use the same optimizer, or {WEIGHTS_ALONE}"
            )

    def _partitioned(self, saved: dict[str, Any], first: str) -> list[_Group]:
        """Groups of ZeRO-1 and 2."""

        def file(rank: int) -> dict[str, Any]:
            return self._file(first.replace("_rank_0_", f"_rank_{rank}_", 1))["optimizer_state_dict"]

        known = file(0)
        if not isinstance(known.get("base_optimizer_state"), dict) or "partition_count" not in known:
            raise CheckpointError(
                f"{self.folder} holds an optimizer's states as zero_optimization.elastic_checkpoint or data_types.grad_accum_dtype make "
                f"DeepSpeed keep them, which cannot be split anew; {WEIGHTS_ALONE}"
            )
        return [
            self._partitioned_group(file, number, shapes, saved["dp_world_size"])
            for number, shapes in enumerate(saved["param_shapes"])
        ]

    def _partitioned_group(self, file: _File, number: int, shapes: dict[str, Any], world: int) -> _Group:
        known, names = file(0), list(shapes)
        gaps = known.get("param_alignment_paddings", {}) or [[0] * len(names)] * (number + 1)
        flat = Flat(tuple(math.prod(shapes[n]) for n in names), tuple(gaps[number]), known["partition_count"][number])
        ranks = world // flat.count
        options = known["base_optimizer_state"]["param_groups"][number]

        def kept(rank: int) -> dict[str, Any]:
            saved = file(rank)
            state = saved["base_optimizer_state"]["state"].get(options["params"][0], {})
            return {**state, _MASTER: saved["single_partition_of_fp32_groups"][number]}

        def state(place: int, rank: int) -> _State:
            elements, numbers = {}, {}
            for key, value in kept(rank).items():
                if key == _MASTER or isinstance(value, Tensor) and value.shape == (flat.size,):
                    elements[key] = tuple(shapes[names[place]]), value.dtype
                else:
                    numbers[key] = value
            return elements, numbers

        def whole(place: int, rank: int, key: str) -> Tensor:
            parts = [kept(partition * ranks + rank)[key].narrow(0, at, n) for partition, at, n in flat.places(place)]
            return torch.cat(parts).view(shapes[names[place]])

        return _Group(names, ranks, options_of(options), state, whole)

    def _plain(self, saved: dict[str, Any]) -> list[_Group]:
        """Groups of a torch optimizer, as with ZeRO-0 in float32."""
        ranks = len(list(self.folder.glob(f"expp_rank_*_{OPTIMIZER}")))
        # Of a model with experts, files of their ranks have it.
        dense: dict[str, Any] = {} if self._expert_files() else saved.get("optimizer") or {}
        if not ranks and not dense:
            raise CheckpointError(f"{self.folder} has no states of an optimizer; {WEIGHTS_ALONE}")

        def file(rank: int) -> dict[str, Any]:
            return self._file(f"expp_rank_{rank}_{OPTIMIZER}")["optimizer"] if ranks else dense

        known = file(0)
        if not ranks and "optimizer_state_dict" in known:
            return self._half(known, saved.get("ds_version", ""))
        if not isinstance(known, dict) or "param_groups" not in known:
            raise CheckpointError(
                f"{self.folder} holds the states of a half-precision optimizer of ZeRO-0 with experts, which are not read; {WEIGHTS_ALONE}"
            )
        groups = self._checked_groups(ranks, [len(group["params"]) for group in known["param_groups"]])

        def kept(held: dict[str, Any], place: int, rank: int) -> dict[str, Any]:
            return file(rank)["state"].get(held["params"][place], {})

        return [
            _group_of(list(group.names), max(1, ranks), options_of(held), partial(kept, held))
            for group, held in zip(groups, known["param_groups"], strict=True)
        ]

    def _half(self, known: dict[str, Any], version: str) -> list[_Group]:
        """Groups of ZeRO-0 in bf16 and fp16, with float32 weights: one tensor a group where the optimizer is fused."""
        check_scale(self.folder, version, known)
        inner, flats = known["optimizer_state_dict"], known.get("fp32_groups_flat")
        masters = flats if flats is not None else known["fp32_groups"]
        sizes = None if flats is not None else [len(held) for held in masters]
        groups = self._checked_groups(1, sizes)

        def group(number: int, names: Sequence[str], held: dict[str, Any]) -> _Group:
            shapes = [layout_of(self.state.parameters[name]).serial_shape for name in names]
            flat = Flat(tuple(map(math.prod, shapes)), (0,) * len(shapes), 1)

            def kept(place: int) -> dict[str, Any]:
                if flats is None:
                    return {**inner["state"].get(held["params"][place], {}), _MASTER: masters[number][place]}
                cut = slice(flat.offsets[place], flat.offsets[place] + flat.sizes[place])
                state = {**inner["state"].get(held["params"][0], {}), _MASTER: flats[number]}
                whole = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim()}
                return state | {key: value[cut].view(shapes[place]) for key, value in whole.items()}

            return _group_of(list(names), 1, options_of(held), lambda place, rank: kept(place))

        return [
            group(number, found.names, held)
            for number, (found, held) in enumerate(zip(groups, inner["param_groups"], strict=True))
        ]

    def _checked_groups(self, ranks: int, sizes: list[int] | None) -> list[Group]:
        """This run's groups, which have as many parameters as those of the checkpoint."""
        groups = self._groups(ranks)
        if sizes is not None and sizes != [len(group.names) for group in groups]:
            raise CheckpointError(
                f"the optimizer in {self.folder} has groups of {sizes} parameters, and the one here makes {[len(g.names) for g in groups]} of "
                "its own; give it the same parameters"
            )
        return groups

    def _groups(self, ranks: int) -> list[Group]:
        """This run's groups on so many expert ranks."""
        layers = {name: layer for name, layer in self.engine.module.named_modules() if isinstance(layer, TedMoE)}
        local = {
            f"{name}.deepspeed_moe.experts.deepspeed_experts.".removeprefix("."): layer.num_experts // ranks
            for name, layer in layers.items()
        }
        sources = [renumbered(names, local) for names in script_groups(self.state.pieces)]
        numel = {name: layout_of(p).serial_shape for name, p in self.state.parameters.items()}
        return stock_groups(
            sources, {name: math.prod(numel[EXPERT.sub(r"\g<1>0\3", name)]) for names in sources for name in names}
        )


def _group_of(names: list[str], ranks: int, options: Notes, kept: Callable[[int, int], dict[str, Any]]) -> _Group:
    """A group whose parameters have their states apart."""

    def state(place: int, rank: int) -> _State:
        elements, numbers = {}, {}
        for key, value in kept(place, rank).items():
            if isinstance(value, Tensor) and value.dim():
                elements[key] = tuple(value.shape), value.dtype
            else:
                numbers[key] = value
        return elements, numbers

    return _Group(names, ranks, options, state, lambda place, rank, key: kept(place, rank)[key])
