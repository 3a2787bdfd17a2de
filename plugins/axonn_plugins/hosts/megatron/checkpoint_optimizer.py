"""Optimizer state in the form that Megatron itself gives it on any number of ranks, though z makes two optimizers of one.

Megatron keeps parameters whose gradients are summed over other ranks in an optimizer of their own, as it does experts'. Saved, the two
are one again; loaded, each takes its part. Beside Muon there are two kinds on one rank, too, Muon's and Adam's, and each is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    param_group_identifier_keys,
)

from axonn_plugins.config.base import ConfigError
from axonn_plugins.hosts.megatron.arguments import fail
from axonn_plugins.hosts.megatron.originals import Originals

_SAME_ANYWHERE = "fully_reshardable"
_JOINED = "axonn_joined"
_NOBODY = "axonn_nobody"
Groups = list[dict[str, Any]]


def install(originals: Originals) -> None:
    """Wrap Megatron's optimizers."""
    originals.wrap(ChainedOptimizer, "sharded_state_dict", _saved_as_one)
    originals.wrap(ChainedOptimizer, "load_state_dict", _loaded_from_one)
    for kind in (FP32Optimizer, Float16OptimizerWithFloat16Params, distrib_optimizer.DistributedOptimizer):
        originals.wrap(kind, "load_state_dict", _told_apart)
    originals.wrap(distrib_optimizer.DistributedOptimizer, "sharded_state_dict", _on_any_ranks)
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        # With torch's Adam, Megatron cannot load what it saves: a state has a step of its own, which was not counted with.
        originals.wrap(
            distrib_optimizer.DistributedOptimizer, "_set_main_param_and_optimizer_states", _but_for_the_step
        )
        originals.wrap(distrib_optimizer.DistributedOptimizer, "load_state_dict", _with_a_step_each)
        originals.wrap(distrib_optimizer.DistributedOptimizer, "state_dict", _without_a_shard)


def join(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sharded state dicts of several optimizers as that of one, which marks itself by what is not stored.

    Args:
        parts: of `FP32Optimizer`, `Float16OptimizerWithFloat16Params` or `DistributedOptimizer`.
    """
    nested = "optimizer" in parts[0]
    inner = [part["optimizer"] if nested else part for part in parts]
    one: dict[str, Any] = {**inner[0], "param_groups": union(inner)}
    if "state" in one:
        one["state"] = _interleaved([part["state"] for part in inner])
    joined = {**parts[0], "optimizer": one} if nested else one
    if "fp32_from_fp16_params" in joined:
        # A list of nothing would be stored, and not fit where there are others.
        joined["fp32_from_fp16_params"] = [group for part in parts for group in part["fp32_from_fp16_params"] if group]
    if "param_state" in joined:
        # Only data-parallel rank 0 has it where it was gathered by gloo.
        joined["param_state"] = _interleaved([part["param_state"] or {} for part in parts])
    joined[_JOINED] = LocalNonpersistentObject(True)
    return joined


def separate(joined: dict[str, Any], groups: Sequence[Groups]) -> list[dict[str, Any]]:
    """Cut a state dict as `join` makes them into those that each optimizer loads.

    Args:
        joined: loaded.
        groups: the parameter groups of each optimizer now.
    """
    nested, count, parts, begin = "optimizer" in joined, len(groups), [], 0
    for number, own in enumerate(groups):
        inner = joined["optimizer"] if nested else joined
        one = {**inner, "param_groups": [_loaded(group, inner["param_groups"]) for group in own]}
        if "state" in one:
            one["state"] = _every(one["state"], number, count)
        part = {**joined, "optimizer": one} if nested else one
        if "fp32_from_fp16_params" in part:
            masters = joined["fp32_from_fp16_params"]
            filled = [bool(group["params"]) for group in own]
            places = [begin + sum(filled[:n]) for n, _ in enumerate(own)]
            part["fp32_from_fp16_params"] = [
                masters[at] if full else [] for at, full in zip(places, filled, strict=True)
            ]
            begin += sum(filled)
        if "param_state" in part:
            part["param_state"] = _every(part["param_state"], number, count)
        part.pop(_JOINED, None)
        parts.append(part)
    return parts


def _identity(group: dict[str, Any]) -> tuple[Any, ...]:
    """The keys by which Megatron tells groups apart, but for whose gradients are summed elsewhere."""
    keys = [key for key in param_group_identifier_keys if key != "is_expert_parallel"]
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in keys)


def _schedule(group: dict[str, Any]) -> tuple[Any, ...]:
    """Which learning rate a group has, of a flag or a script's own: Megatron's keys do not tell, though groups differ in nothing else."""
    return tuple(group.get(key) for key in ("default_config", "max_lr", "min_lr", "start_wd", "end_wd"))


def union(inner: Sequence[dict[str, Any]]) -> Groups:
    """Parameter groups of several optimizers, without parameters, as one optimizer has them on one rank."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for part in inner:
        for group in part["param_groups"]:
            kept = {key: value for key, value in group.items() if key != "params"}
            key = _identity(group) + _schedule(group)
            found.setdefault(key, {**kept, "is_expert_parallel": False})
    return list(found.values())


def _loaded(own: dict[str, Any], groups: Groups) -> dict[str, Any]:
    """A group of ours with what was saved of its like."""
    saved = _like(own, groups)
    return {**saved, "is_expert_parallel": own["is_expert_parallel"], "params": own["params"]}


def _like(own: dict[str, Any], groups: Groups) -> dict[str, Any]:
    """A group as it was saved; of several one with its schedule, which flags may have changed, or one that has another than the default, too."""
    alike = [group for group in groups if _identity(group) == _identity(own)]
    if not alike:
        keys = [key for key in param_group_identifier_keys if key != "is_expert_parallel"]
        words = ", ".join(f"{key} = {value}" for key, value in zip(keys, _identity(own), strict=True))
        fail(
            ConfigError(
                f"--load: the checkpoint's optimizer has no group of parameters with {words}, as this run's has; give the flags with which it was "
                "saved, as --decoupled-lr, or load it with --no-load-optim"
            )
        )
    schedule = _schedule(own)
    return max(alike, key=lambda group: (_schedule(group) == schedule, _schedule(group)[0] == schedule[0]))


def _told_apart(original: Any) -> Any:
    """Number groups that Megatron takes for one another while it loads: it would give all of them the schedule of the last."""

    @wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        groups = getattr(self.optimizer, "param_groups", [])
        if len({_identity(group) for group in groups}) == len(groups):
            return original(self, state_dict)
        inner = state_dict.get("optimizer", state_dict)
        places = [{key: group[key] for key in ("params",) if key in group} for group in inner["param_groups"]]
        saved = [{**_like(group, inner["param_groups"]), **place} for group, place in zip(groups, places, strict=True)]
        before = [group["is_decoupled_lr"] for group in groups]
        for number, (group, kept) in enumerate(zip(groups, saved, strict=True)):
            group["is_decoupled_lr"] = kept["is_decoupled_lr"] = number
        inner["param_groups"] = saved
        try:
            original(self, state_dict)
        finally:
            for group, told in zip(self.optimizer.param_groups, before, strict=True):
                group["is_decoupled_lr"] = told

    return load_state_dict


def _interleaved(states: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
    """States by the number of their parameter; what is not a parameter's is common to all."""
    found: dict[Any, Any] = {}
    for number, state in enumerate(states):
        for key, value in state.items():
            found[key * len(states) + number if isinstance(key, int) else key] = value
    return found


def _every(state: dict[Any, Any], number: int, count: int) -> dict[Any, Any]:
    found = {key // count: one for key, one in state.items() if isinstance(key, int) and key % count == number}
    return found | {key: value for key, value in state.items() if not isinstance(key, int)}


def _kinds(chain: Sequence[Any]) -> list[list[Any]]:
    """Optimizers of a chain, those together that do the same."""
    found: dict[type, list[Any]] = {}
    for one in chain:
        found.setdefault(type(one.optimizer), []).append(one)
    return list(found.values())


def _saved_as_one(original: Any) -> Any:
    @wraps(original)
    def sharded_state_dict(self: Any, model: Any, is_loading: bool = False, **named: Any) -> Any:
        chain = self.chained_optimizers
        for one in chain:
            if getattr(one, "init_state_fn", _momentum) is None:
                one.init_state_fn = _momentum
        kinds = _kinds(chain)
        elsewhere = any(group.get("is_expert_parallel") for one in chain for group in one.param_groups)
        if len(chain) == len(kinds) and not elsewhere:
            return original(self, model, is_loading, **named)
        self._synchronize_steps()
        made = [join([one.sharded_state_dict(model, is_loading, **named) for one in kind]) for kind in kinds]
        return made[0] if len(made) == 1 else dict(enumerate(made))

    return sharded_state_dict


def _momentum(optimizer: torch.optim.Optimizer, config: object = None) -> None:
    """Room for SGD's state, for which Megatron has no such function, so that it cannot load what it has saved."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def as_of_one(loaded: dict[Any, Any]) -> dict[Any, Any]:
    """Join what stock Megatron saved of an optimizer of experts and one of all else.

    Args:
        loaded: tensors as of one, whose names are the same, and all else under the numbers of the two; of optimizers of several kinds, that
            have everything under their numbers, nothing changes.
    """
    numbers = sorted(key for key in loaded if isinstance(key, int))
    if not numbers or len(numbers) == len(loaded):
        return loaded
    parts = [loaded.pop(number) for number in numbers]
    nested = "optimizer" in parts[0]
    groups = union([part["optimizer"] if nested else part for part in parts])
    for part in parts:
        (part["optimizer"] if nested else part).pop("param_groups")
    inner = loaded.setdefault("optimizer", {}) if nested else loaded
    # Numbers of parameters are of this run, and in its order.
    places: list[dict[str, Any]] = inner.get("param_groups", [])
    inner["param_groups"] = [
        {**group, **place} for group, place in zip_longest(groups, places, fillvalue=dict[str, Any]())
    ]
    return _filled(loaded, parts[0])


def _filled(found: dict[Any, Any], others: dict[Any, Any]) -> dict[Any, Any]:
    """A dict with what it lacks of another one."""
    for key, value in others.items():
        if isinstance(value, dict) and isinstance(found.get(key), dict):
            _filled(found[key], value)
        else:
            found.setdefault(key, value)
    return found


def _loaded_from_one(original: Any) -> Any:
    @wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        if isinstance(state_dict, dict):
            state_dict = as_of_one(state_dict)
            every = [state_dict] if _JOINED in state_dict else [one for _, one in sorted(state_dict.items())]
            if all(isinstance(one, dict) and _JOINED in one for one in every):
                parts: dict[Any, dict[str, Any]] = {}
                for kind, one in zip(_kinds(self.chained_optimizers), every, strict=True):
                    groups = [part.optimizer.state_dict()["param_groups"] for part in kind]
                    parts |= dict(zip(kind, separate(one, groups), strict=True))
                state_dict = [parts[one] for one in self.chained_optimizers]
                state_dict = state_dict if len(parts) > 1 else state_dict[0]
        original(self, state_dict)

    return load_state_dict


def _on_any_ranks(original: Any) -> Any:
    @wraps(original)
    def sharded_state_dict(self: Any, model: Any = None, is_loading: bool = False, *args: Any, **named: Any) -> Any:
        kind = (named.get("metadata") or {}).get("distrib_optim_sharding_type")
        if kind is None:
            fail(
                ConfigError(
                    "--load: it was saved without --use-distributed-optimizer, and its optimizer's state is of another form; load it "
                    "without that, or with --no-load-optim"
                )
            )
        if kind != _SAME_ANYWHERE:
            fail(
                ConfigError(
                    f"--load: its distributed optimizer's state is of type {kind}, which only the ranks that saved it can read; save it with "
                    "--dist-ckpt-optim-fully-reshardable, or load it with --no-load-optim"
                )
            )
        if not distrib_optimizer.HAVE_APEX_OR_TE:
            if not is_loading:
                _agree_on_step(self)
            elif not self.optimizer.state:
                # Torch's Adam has no step yet, for which Megatron asks it.
                self._init_optimizer_states_with_dummy_values()
        return original(self, model or {}, is_loading, *args, **named)

    return sharded_state_dict


def _but_for_the_step(original: Any) -> Any:
    @wraps(original)
    @torch.no_grad()  # which Megatron forgets where it loads files of format torch
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        original(self, model_param, {**tensors, "step": state["step"]} if "step" in state else tensors)

    return set_states


def _with_a_step_each(original: Any) -> Any:
    """One tensor for all would be raised once for each parameter."""

    @wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    return load_state_dict


def _agree_on_step(optimizer: Any) -> None:
    """Tell it the ranks that have no parameter, since what is common to all ranks should not differ."""
    group = optimizer.data_parallel_group
    if group.size() == 1:
        return
    inner = optimizer.optimizer
    own = max((float(state["step"]) for state in inner.state.values()), default=0.0)
    step = torch.tensor([own], device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(step, dist.ReduceOp.MAX, group)
    if not inner.state:
        inner.param_groups[0]["step"] = step.item()


def _without_a_shard(original: Any) -> Any:
    """Megatron reads the step off a parameter's state, and a rank behind the last parameter's end has none."""

    @wraps(original)
    def state_dict(self: Any) -> Any:
        inner = self.optimizer
        if inner.state or any(group["params"] for group in inner.param_groups):
            return original(self)
        inner.state[_NOBODY] = {"step": torch.tensor(float(inner.param_groups[0].get("step", 0)))}
        try:
            return original(self)
        finally:
            del inner.state[_NOBODY]

    return state_dict
