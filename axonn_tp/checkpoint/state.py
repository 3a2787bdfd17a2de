"""The part of a checkpoint that is a model's, by the serial model's names.

Tensors that lie on the grid become `Shard`s; the rest, equal on all ranks, goes into a dict, the *notes*.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from axonn_tp.checkpoint.dealt import DealtNames
from axonn_tp.checkpoint.files import CheckpointError
from axonn_tp.checkpoint.planner import Shard
from axonn_tp.grid.layout import layout_of
from axonn_tp.layers.exports import as_shards

_EXTRA = "_extra_state"

Shards = dict[str, Shard]
Notes = dict[str, Any]


def model_state(model: nn.Module) -> tuple[Shards, Notes]:
    """Parameters and buffers as ``model.NAME``; a parameter that layers share once, under its first name.

    Of buffers, such as BatchNorm's averages of the samples that a rank has read, those of the first rank are written, as one file has them.
    """
    shards: Shards = {}
    first: dict[int, str] = {}
    aliases, modules, names = {}, {}, DealtNames(model)
    with as_shards():
        held = model.state_dict(keep_vars=True)
    for name, value in held.items():
        if name.endswith(_EXTRA) or not isinstance(value, Tensor):
            modules[name] = value
        elif (known := first.setdefault(id(value), name)) != name:
            aliases[name] = known
        else:
            everyones = names.outward(name, 0) == names.outward(name, 1)
            shards[f"model.{name}"] = Shard(
                value, layout_of(value), of_first=everyones and not isinstance(value, nn.Parameter)
            )
    return shards, {"aliases": aliases, "modules": modules}


def is_frozen(value: Any) -> bool:
    """True for a parameter that is not trained."""
    return isinstance(value, nn.Parameter) and not value.requires_grad


def restore_modules(model: nn.Module, notes: Notes, shards: Shards) -> None:
    """Give modules the state that is no parameter or buffer of theirs, as far as the model has them, and call their hooks of a `load_state_dict`.

    Args:
        model: the model.
        notes: of the checkpoint, on the model.
        shards: that were read into what `model_targets` gave.

    Raises:
        CheckpointError: what a module's `state_dict` gives is a copy, and it takes none back.
    """
    modules, others = dict(model.named_modules()), dict[str, Any]()
    for name, value in notes["modules"].items():
        module = modules.get(name.removesuffix(_EXTRA).rstrip("."))
        if not name.endswith(_EXTRA):
            others[name] = value
        elif module is not None:
            module.set_extra_state(value)
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    named = {name.removeprefix("model."): shard.tensor for name, shard in shards.items() if name.startswith("model.")}
    _hand_over(model, modules, others | {name: tensor for name, tensor in named.items() if id(tensor) not in own})
    for module in reversed(modules.values()):
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, _IncompatibleKeys([], []))


def _hand_over(model: nn.Module, modules: Mapping[str, nn.Module], copies: Mapping[str, Any]) -> None:
    """Have modules take what their `_save_to_state_dict` has made, as persistent states of torchmetrics, by their `_load_from_state_dict`."""
    by_owner: dict[str, dict[str, Any]] = {}
    for name, value in copies.items():
        owner = name.rpartition(".")[0]
        while owner not in modules:
            owner = owner.rpartition(".")[0]
        by_owner.setdefault(owner, {})[name] = value
    with as_shards():
        for owner, held in by_owner.items():
            modules[owner]._load_from_state_dict(dict(held), f"{owner}." if owner else "", {}, False, [], [], [])
        there = model.state_dict(keep_vars=True) if copies else {}
    for name, value in copies.items():
        if isinstance(value, Tensor) and not (name in there and _same(value, there[name])):
            raise CheckpointError(
                f"{name} in state_dict() of {type(model).__name__} is neither a parameter nor a buffer, and cannot be read back into it; register it "
                "as a buffer, or give its module a _load_from_state_dict that takes it"
            )


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (one != one) & (other != other)).all())


def check_tensors(
    shards: Shards, stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]], converted: bool = False
) -> None:
    """Refuse to read into tensors of another shape or dtype.

    Args:
        shards: what will be read.
        stored: serial shapes and dtypes in the checkpoint.
        converted: numbers of another floating-point type are converted.

    Raises:
        CheckpointError: names the tensor.
    """
    for name, shard in shards.items():
        if name not in stored:
            raise CheckpointError(f"the checkpoint has no {name}; load it into the model that was saved")
        shape, dtype = stored[name]
        if shape != shard.layout.serial_shape:
            raise CheckpointError(
                f"{name} has shape {shape} in the checkpoint and {shard.layout.serial_shape} here; load it into the model that was saved"
            )
        floating = converted and dtype.is_floating_point and shard.tensor.is_floating_point()
        if dtype != shard.tensor.dtype and not floating:
            raise CheckpointError(
                f"{name} is {dtype} in the checkpoint and {shard.tensor.dtype} here; build the model in the dtype that was saved"
            )


def model_targets(model: nn.Module, notes: Notes, strict: bool = True, converted: bool = False) -> Shards:
    """The model's shards by their names in the checkpoint.

    Args:
        model: the model.
        notes: of the checkpoint.
        strict: refuse what is here or there alone; else it is left out, as by torch's `load_state_dict`.
        converted: see `check_tensors`.

    Raises:
        CheckpointError: names a parameter that is here or there alone, or of another shape or dtype.
    """
    shards, _ = model_state(model)
    if not strict:
        known = notes["tensors"].keys() | {f"model.{name}" for name in notes["model"]["aliases"]}
        shards = {name: shard for name, shard in shards.items() if name in known}
    check_tensors(shards, notes["tensors"], converted)
    for name in notes["tensors"] if strict else ():
        if name.startswith("model.") and name not in shards:
            raise CheckpointError(
                f"the checkpoint has {name}, which the model has not; load it into the model that was saved"
            )
    return shards
