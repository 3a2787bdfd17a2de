"""The part of a checkpoint that is an optimizer's and its scheduler's, by the serial model's parameter names.

So it depends neither on the grid nor on how parameters are grouped, or flattened and partitioned as under ZeRO.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from axonn_tp.checkpoint.files import CheckpointError
from axonn_tp.checkpoint.planner import Shard
from axonn_tp.checkpoint.state import Notes, Shards, check_tensors
from axonn_tp.grid.layout import Layout, layout_of

PER_GROUP_LISTS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
# How a step is computed, and how this run groups its parameters, is its own choice.
_NOT_OPTIONS = (
    "params",
    "param_names",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "moe",
    "name",
    "axonn_source",
)


@dataclass(frozen=True)
class Piece:
    """Where an optimizer keeps the states of one parameter, or of a part of it.

    Attributes:
        name: the parameter's, in the serial model.
        layout: the parameter's.
        holder: the tensor whose states they are: the parameter, or a flat partition that holds parts of several.
        offset: where the part begins in the flattened holder.
        length: its elements; 0 where another rank holds them.
        start: the element of the rank's flattened local tensor that the part begins with.
    """

    name: str
    layout: Layout
    holder: Tensor
    offset: int
    length: int
    start: int = 0

    def shard(self, state: Tensor) -> Shard:
        """The part's elements in a tensor of the holder's shape."""
        if self.offset == 0 and self.length == state.numel():
            return Shard(state, self.layout, self.start)
        return Shard(state.view(-1).narrow(0, self.offset, self.length), self.layout, self.start)


Pieces = list[list[Piece]]


def whole_pieces(model: nn.Module, optimizer: torch.optim.Optimizer) -> Pieces:
    """A piece for every parameter that the optimizer trains, by parameter group.

    Raises:
        CheckpointError: the optimizer has a parameter that the model does not have, or states in another optimizer.
    """
    _check_own_states(optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: Pieces = []
    for group in optimizer.param_groups:
        found.append([])
        for parameter in group["params"]:
            if getattr(parameter, "axonn_stands_in", False):  # for none, on a stage that trains nothing
                continue
            if id(parameter) not in names:
                raise CheckpointError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's; "
                    "give the model that it trains"
                )
            found[-1].append(Piece(names[id(parameter)], layout_of(parameter), parameter, 0, parameter.numel()))
    return found


def _check_own_states(optimizer: torch.optim.Optimizer) -> None:
    """Refuse one that steps by another, as Lookahead and `samo.Optimizer` do: what that one has gathered is not in its own state."""
    for name, held in vars(optimizer).items():
        if isinstance(held, torch.optim.Optimizer) and held.state is not optimizer.state:
            remedy = getattr(optimizer, "axonn_saved_by", None) or (
                "save and load without the optimizer, and keep what its state_dict() gives on each rank in a file of that rank, for its "
                "load_state_dict there"
            )
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps states in another optimizer ({name}: {type(held).__name__}), which a checkpoint would be "
                f"without; {remedy}"
            )


def optimizer_state(optimizer: torch.optim.Optimizer, pieces: Pieces) -> tuple[Shards, Notes]:
    """States as ``optimizer.NAME.KEY``.

    Args:
        optimizer: the optimizer.
        pieces: where it keeps its states, by parameter group.

    Raises:
        CheckpointError: a state is neither of its holder's shape nor a single number, nor a dict of what is the same on all ranks.
    """
    shards: Shards = {}
    notes: Notes = {"class": type(optimizer).__name__, "groups": groups_of(optimizer, pieces)}
    notes["tensors"], notes["others"] = {}, {}
    for piece in chain.from_iterable(pieces):
        if piece.holder not in optimizer.state:
            continue
        tensors, others = notes["tensors"].setdefault(piece.name, []), notes["others"].setdefault(piece.name, {})
        for key, value in optimizer.state[piece.holder].items():
            if isinstance(value, Tensor) and value.dim() and value.shape == piece.holder.shape:
                shards[f"optimizer.{piece.name}.{key}"] = piece.shard(value)
                tensors.append(key)
            elif _is_number(value):
                others[key] = _kept(value)
            elif isinstance(value, Mapping):
                others[key] = {name: _kept(one) for name, one in value.items()}
            else:
                raise CheckpointError(
                    f"the state {key} of parameter {piece.name} in {notes['class']} is not of the parameter's shape, and "
                    "cannot be split anew; use an element-wise optimizer such as AdamW, or save without the optimizer"
                )
    return shards, notes


def _kept(value: Any) -> Any:
    return value.cpu().clone() if isinstance(value, Tensor) else value


def _is_number(value: Any) -> bool:
    """True if a value of the state, such as a count of steps, is the same on all ranks."""
    return (
        value is None or isinstance(value, (bool, int, float, str)) or (isinstance(value, Tensor) and not value.dim())
    )


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group, such as its learning rate, without its parameters."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def groups_of(optimizer: torch.optim.Optimizer, pieces: Pieces) -> list[Notes]:
    """Parameter groups with names for parameters."""
    return [
        {
            "params": [piece.name for piece in members],
            "options": options_of(group),
        }
        for group, members in zip(optimizer.param_groups, pieces, strict=True)
    ]


def optimizer_targets(
    optimizer: torch.optim.Optimizer, pieces: Pieces, notes: Notes
) -> tuple[Shards, Callable[[], None]]:
    """New tensors for the optimizer's states, to be read into, and a function that hands them over.

    Raises:
        CheckpointError: says what the saved optimizer and this one do not share.
    """
    saved = notes.get("optimizer")
    if saved is None:
        raise CheckpointError("the checkpoint was saved without an optimizer; load it without one")
    if saved["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint holds the state of {saved['class']}, and the optimizer here is {type(optimizer).__name__}; use the same"
        )
    options = [
        saved["groups"][group]["options"] for group in matched_groups(groups_of(optimizer, pieces), saved["groups"])
    ]
    shards: Shards = {}
    states: dict[Tensor, dict[str, Any]] = {}
    for group, members in zip(optimizer.param_groups, pieces, strict=True):
        for piece in members:
            if piece.name not in saved["others"]:
                continue
            state = states.setdefault(piece.holder, {})
            state |= {
                key: _number(key, value, piece.holder, group) for key, value in saved["others"][piece.name].items()
            }
            for key in saved["tensors"][piece.name]:
                full = f"optimizer.{piece.name}.{key}"
                if key not in state:
                    dtype = notes["tensors"][full][1]
                    state[key] = torch.zeros_like(piece.holder, dtype=dtype, requires_grad=False)
                shards[full] = piece.shard(state[key])
    check_tensors(shards, notes["tensors"])

    def hand_over() -> None:
        for group, chosen in zip(optimizer.param_groups, options, strict=True):
            group.update(chosen)
        optimizer.state.clear()
        optimizer.state.update(states)  # type: ignore[arg-type]

    return shards, hand_over


def _number(key: str, value: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """A number where torch's `load_state_dict` puts it: on the parameter's device, but for steps, which fused and capturable optimizers alone count there."""
    if isinstance(value, Tensor):
        on_device = key != "step" or group.get("fused") or group.get("capturable")
        return value.to(parameter.device if on_device else value.device, copy=True)
    return value


def matched_groups(here: list[Notes], saved: list[Notes]) -> list[int]:
    """For each parameter group of this run the saved one that its parameters were in.

    Args:
        here: the groups of this run (`groups_of`).
        saved: those of the checkpoint.

    Raises:
        CheckpointError: a parameter is trained here or there alone, or a group joins parameters with other options.
    """
    source = {name: number for number, group in enumerate(saved) for name in group["params"]}
    trained = {name for group in here for name in group["params"]}
    for name in source.keys() - trained:
        raise CheckpointError(
            f"the saved optimizer trained {name}, and the one here does not; give it the same parameters"
        )
    found = []
    for group in here:
        for name in group["params"]:
            if name not in source:
                raise CheckpointError(
                    f"the saved optimizer did not train {name}, and the one here does; give it the same parameters"
                )
            first, other = source[group["params"][0]], source[name]
            if differ(saved[first]["options"], saved[other]["options"]):
                raise CheckpointError(
                    f"parameters {group['params'][0]} and {name} had other options when saved and share a group here; group them as then"
                )
        found.append(source[group["params"][0]] if group["params"] else 0)
    return found


def differ(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """True if the options of two groups do."""
    return a is not b and (a.keys() != b.keys() or any(bool(a[key] != b[key]) for key in a))


def scheduler_state(scheduler: Any) -> Notes:
    """Notes on a schedule."""
    return {"scheduler": scheduler.state_dict(), "scheduler class": type(scheduler).__name__}


def check_scheduler(scheduler: Any, notes: Notes) -> None:
    """Refuse the state of another kind of schedule, of which this one would take nothing, and begin anew.

    Raises:
        CheckpointError: it is; where the checkpoint says of which kind it is, as earlier ones do not.
    """
    saved, here = notes.get("scheduler class", type(scheduler).__name__), type(scheduler).__name__
    if saved != here:
        raise CheckpointError(
            f"the checkpoint holds the state of the schedule {saved}, and the schedule here is {here}; use the same, or load it without the schedule's state"
        )


def regrouped(state: Any, groups: list[int], before: int) -> Any:
    """A scheduler's state for other parameter groups: lists with an entry a group get those of `groups`.

    Args:
        state: what its `state_dict` returned, with those of schedulers inside it.
        groups: which saved group each one of this run was.
        before: how many were saved.
    """
    if isinstance(state, dict):
        return {
            key: [value[group] for group in groups]
            if key in PER_GROUP_LISTS and isinstance(value, list) and len(value) == before
            else regrouped(value, groups, before)
            for key, value in state.items()
        }
    return [regrouped(value, groups, before) for value in state] if isinstance(state, list) else state
