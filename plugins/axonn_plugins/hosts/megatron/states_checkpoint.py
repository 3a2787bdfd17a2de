"""Checkpoints of our optimizer under Megatron: dense states under Megatron's own names, and masks beside them.

So a run goes on on another grid, pruned or dense, and stock Megatron reads it as its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from torch import Tensor, nn

from axonn_plugins.hosts.megatron.checkpoint_optimizer import union
from axonn_plugins.optim.state import MASTER
from axonn_plugins.samo.pruning import Masks

if TYPE_CHECKING:
    from axonn_plugins.hosts.megatron.states_optimizer import StateOptimizer

NOTES, _MASKS, _SUM = "axonn_samo", "axonn_masks", "first"
_MASTERS = "fp32_from_fp16_params"
_KEYS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
_HALVES = (torch.bfloat16, torch.float16)


def sharded(optimizer: StateOptimizer, model: Any, is_loading: bool) -> dict[str, Any]:
    """The optimizer for `megatron.core.dist_checkpointing`, in host memory.

    Args:
        optimizer: ours.
        model: the model's sharded state dict.
        is_loading: whether what it holds is only room.
    """
    parameters = optimizer.get_parameters()
    places = get_param_id_to_sharded_param_map(model, parameters)
    dense = {} if is_loading else optimizer.optimizer.state_dict()["state"]
    keys = _KEYS[optimizer.config.optimizer]
    state = {n: {key: _whole(dense.get(n, {}), key, p) for key in keys} for n, p in enumerate(parameters)}
    # Only one of several ways to the same update.
    groups = [{**group, "fused": None} if "fused" in group else group for group in optimizer.param_groups]
    inner: dict[str, Any] = {"state": state, "param_groups": union([{"param_groups": groups}])}
    for group in inner["param_groups"]:
        group["params"] = []
    optim_state_to_sharding_state(inner, places)
    step = next((one["step"] for one in dense.values() if "step" in one), None)
    if step is not None:
        inner["state"]["common_step"] = step.cpu().clone()
    found = inner
    if optimizer.config.fp16 or optimizer.config.bf16:
        masters = [
            make_sharded_optimizer_tensor(places[n], _whole(dense.get(n, {}), MASTER, p), "optimizer.state.fp32_param")
            for n, p in _halves(parameters)
        ]
        found = {"optimizer": inner, _MASTERS: [masters]}
        if optimizer.grad_scaler is not None:
            found["grad_scaler"] = optimizer.grad_scaler.state_dict()
    notes, masks = (optimizer.notes, {}) if is_loading else _masks(optimizer)
    if notes:
        names = optimizer.host.serial_names() if not is_loading else {}
        found[NOTES] = notes
        found[_MASKS] = {
            key: {
                n: make_sharded_optimizer_tensor(places[n], _part(masks, key, names.get(p), p), f"axonn.{key}")
                for n, p in enumerate(parameters)
            }
            for key in notes["names"]
        }
    return found


def _halves(parameters: list[nn.Parameter]) -> Iterator[tuple[int, nn.Parameter]]:
    return ((number, one) for number, one in enumerate(parameters) if one.dtype in _HALVES)


def _whole(state: Mapping[str, Tensor], key: str, parameter: nn.Parameter) -> Tensor:
    """A state of all of a parameter's elements, zeros where there is none."""
    whole = torch.zeros(parameter.numel(), dtype=torch.promote_types(parameter.dtype, torch.float32))
    if key in state:
        where = state["positions"].long().cpu() if "positions" in state else slice(None)
        whole[where] = state[key].cpu()
    return whole.view(parameter.shape)


def _part(masks: Mapping[str, Masks], key: str, name: str | None, parameter: nn.Parameter) -> Tensor:
    """A parameter's mask, or sum of first gradients, zeros where it has none."""
    dtype = torch.promote_types(parameter.dtype, torch.float32) if key == _SUM else torch.uint8
    found = masks.get(key, {}).get(name or "")
    return torch.zeros(parameter.shape, dtype=dtype) if found is None else found.to("cpu", dtype)


def _masks(optimizer: StateOptimizer) -> tuple[dict[str, Any], dict[str, Masks]]:
    """Masks, the state of a search and sums of first gradients: notes, the same on all ranks, and this rank's masks and sums by key."""
    pruning = optimizer.composition.pruning
    if pruning is None:
        return {}, {}
    found = {"mask": pruning.masks(optimizer.optimizer)} if pruning.pruned else {}
    seen, search = pruning.search_state()
    for name, key, mask in seen:
        found.setdefault(key, {})[name] = mask
    first, taken = pruning.first_gradients, 0
    if first is not None and first.taken:
        found[_SUM], taken = first.so_far(optimizer.optimizer), first.taken
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {key: list(masks) for key, masks in found.items()})
    keys = sorted({key for one in everyone for key in one})
    names = {key: sorted({name for one in everyone for name in one.get(key, ())}) for key in keys}
    return {"pruned": pruning.pruned, "search": search, "owed": pruning.owed, "taken": taken, "names": names}, found


def _read_parts(
    optimizer: StateOptimizer, read: Mapping[str, Any], names: Mapping[nn.Parameter, str], key: str
) -> Masks:
    wanted, parts = read[NOTES]["names"].get(key, ()), read[_MASKS].get(key, {})
    return {names[p]: parts[n].to(p.device) for n, p in enumerate(optimizer.get_parameters()) if names[p] in wanted}


def _read_masks(
    optimizer: StateOptimizer, read: Mapping[str, Any], names: Mapping[nn.Parameter, str], key: str
) -> Masks:
    return {name: part.bool() for name, part in _read_parts(optimizer, read, names, key).items()}


def masks_in(optimizer: StateOptimizer, read: Mapping[str, Any], names: Mapping[nn.Parameter, str]) -> Masks | None:
    """The masks of this rank's parameters by which a checkpoint's model is pruned; None: it is dense."""
    pruned = read.get(NOTES, {}).get("pruned", False)
    return _read_masks(optimizer, read, names, "mask") if pruned else None


def take(optimizer: StateOptimizer, read: Mapping[str, Any]) -> None:
    """Go on with what was read; every rank calls it.

    Args:
        optimizer: ours, pruned as the checkpoint is.
        read: of `sharded`'s form.
    """
    inner = read.get("optimizer", read)
    step = inner["state"].get("common_step")
    state: dict[int, dict[str, Any]] = {number: {} for number, _ in enumerate(optimizer.get_parameters())}
    counted = {} if step is None else {"step": torch.as_tensor(step, dtype=torch.float32)}
    for number in state if counted or optimizer.config.optimizer == "sgd" else ():  # which counts no steps
        state[number] = {**{key: value.clone() for key, value in counted.items()}, **inner["state"][number]}
    if _MASTERS in read:
        for (number, _), master in zip(_halves(optimizer.get_parameters()), read[_MASTERS][0], strict=True):
            state[number][MASTER] = master
    groups, begin = [], 0
    for group in optimizer.param_groups:
        groups.append({"params": list(range(begin, begin + len(group["params"])))})
        begin += len(group["params"])
    optimizer.optimizer.load_state_dict({"state": state, "param_groups": groups, "loss_scale": None})
    if optimizer.grad_scaler is not None and "grad_scaler" in read:
        optimizer.grad_scaler.load_state_dict(read["grad_scaler"])
    pruning, notes = optimizer.composition.pruning, read.get(NOTES, {})
    if pruning is not None and pruning.pruned:
        pruning.owed = notes.get("owed", False)
    elif pruning is not None:
        names = optimizer.host.serial_names()
        search = notes.get("search")
        pruning.resume_search(search, lambda key: _read_masks(optimizer, read, names, key))
        if pruning.first_gradients is not None and notes.get("taken"):
            pruning.first_gradients.go_on(notes["taken"], _read_parts(optimizer, read, names, _SUM))
