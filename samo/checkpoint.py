"""State dicts of compressed state: written whole by any number of ranks, read by any other, and to and from dense runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from samo.reducer import gather
from samo.store import Entry, Store

if TYPE_CHECKING:
    from samo.optimizer import Optimizer


def state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """See `Optimizer.state_dict`."""
    numbers = {parameter: number for number, parameter in enumerate(_parameters(optimizer))}
    state: dict[int, dict[str, Any]] = {}
    for store in optimizer.stores:
        vectors, scalars = _vectors(optimizer, store)
        for entry in store.entries:
            found: dict[str, Any] = {} if entry.index is None else {"positions": entry.index.positions().int()}
            known = entry in scalars
            for key, vector in vectors.items():
                if known or key == "master":
                    found[key] = vector[entry.start : entry.start + entry.kept].clone()
            state[numbers[entry.parameter]] = found | scalars.get(entry, {})
    groups, count = [], 0
    for group in optimizer.param_groups:
        members = list(range(count, count + len(group["params"])))
        count += len(members)
        groups.append({key: value for key, value in group.items() if key != "params"} | {"params": members})
    scale = None if optimizer.loss_scale is None else optimizer.loss_scale.state_dict()
    return {"state": dict(sorted(state.items())), "param_groups": groups, "loss_scale": scale}


def load_state_dict(optimizer: Optimizer, loaded: dict[str, Any]) -> None:
    """See `Optimizer.load_state_dict`."""
    parameters = _parameters(optimizer)
    theirs = sum(len(group["params"]) for group in loaded["param_groups"])
    if theirs != len(parameters) or len(loaded["param_groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"the state is of {theirs} parameters in {len(loaded['param_groups'])} groups, the optimizer has "
            f"{len(parameters)} in {len(optimizer.param_groups)}; make it over the same model"
        )
    order = [number for group in loaded["param_groups"] for number in group["params"]]
    state = {parameter: loaded["state"].get(number, {}) for number, parameter in zip(order, parameters, strict=True)}
    read = {entry: _on_index(entry, state[entry.parameter]) for entry in optimizer.entries}
    for ours, group in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
        ours.update({key: value for key, value in group.items() if key not in ("params", "param_names")})
    if optimizer.loss_scale is not None and loaded.get("loss_scale"):
        optimizer.loss_scale.load_state_dict(loaded["loss_scale"])
    optimizer.inner.state.clear()
    for tile, piece in optimizer.pieces():
        segment = piece.segment
        mine: dict[str, Any] = {}
        for key, value in read[segment.entry].items():
            whole = isinstance(value, Tensor) and value.dim() == 1
            part = value[segment.begin : segment.begin + segment.length] if whole else value
            if key != "master":
                mine[key] = part.clone() if isinstance(part, Tensor) else part
            elif tile.store.master is not None:
                piece.weights.copy_(part)
        if mine:
            optimizer.inner.state[piece.weights] = mine
    _write_masters(optimizer)


def dense_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """A state_dict that the plain torch optimizer of the dense model takes: zeros where elements are pruned.

    With `shard` every rank calls it. "master", the float32 weights, is there for 16-bit parameters only; torch ignores it.
    """
    found = state_dict(optimizer)
    by_parameter = {entry.parameter: entry for entry in optimizer.entries}
    numbered = list(enumerate(_parameters(optimizer)))
    known = {by_parameter[p].group: found["state"][n] for n, p in numbered if "step" in found["state"].get(n, {})}
    for number, parameter in numbered:
        if number in found["state"]:
            entry = by_parameter[parameter]
            if entry.kept == 0:
                found["state"][number] = _of_nothing(found["state"][number], known.get(entry.group, {}))
            found["state"][number] = {
                key: entry.dense(value) if isinstance(value, Tensor) and value.dim() == 1 else value
                for key, value in found["state"][number].items()
                if key != "positions"
            }
    del found["loss_scale"]
    return found


def _of_nothing(state: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """State of a parameter that is pruned whole, which no step has made: as another of its group has it, with no element."""
    empty = {
        key: t.new_empty(0) for key, t in like.items() if isinstance(t, Tensor) and t.dim() == 1 and key != "positions"
    }
    return {key: value for key, value in like.items() if key not in empty} | empty | state


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _vectors(optimizer: Optimizer, store: Store) -> tuple[dict[str, Tensor], dict[Entry, dict[str, Any]]]:
    """A store's state as vectors over all of its kept elements, by key, and what is one value a parameter, by entry."""
    pieces = [piece for tile in optimizer.tiles if tile.store is store for piece in tile.pieces]
    owned: dict[str, Tensor] = {} if store.master is None else {"master": store.master}
    scalars: dict[Entry, dict[str, Any]] = {}
    for piece in pieces:
        for key, value in optimizer.inner.state.get(piece.weights, {}).items():
            scalars.setdefault(piece.segment.entry, {})
            if isinstance(value, Tensor) and value.shape == (piece.segment.length,):
                if key not in owned:
                    owned[key] = torch.zeros(store.owned, dtype=value.dtype, device=value.device)
                owned[key][piece.segment.master : piece.segment.master + piece.segment.length] = value
            else:
                scalars[piece.segment.entry][key] = value
    if store.shard:
        scalars = _agree(store, owned, scalars)
    return {key: _whole(store, owned[key]) for key in sorted(owned)}, scalars


def _agree(store: Store, owned: dict[str, Tensor], scalars: dict[Entry, dict[str, Any]]) -> dict[Entry, dict[str, Any]]:
    """Learn from the other ranks what a parameter's state has of which this rank holds no part; adds vectors to `owned`."""
    mine = (
        {entry.name: values for entry, values in scalars.items()},
        {key: vector.dtype for key, vector in owned.items()},
    )
    merged: dict[str, dict[str, Any]] = {}
    for group in dict.fromkeys(bucket.process_group for bucket in store.buckets):
        if group is None:
            continue
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, mine, group=group)
        for values, dtypes in found:
            merged |= values
            for key in sorted(dtypes):
                owned.setdefault(key, torch.zeros(store.owned, dtype=dtypes[key], device=store.gradient.device))
    return {entry: merged[entry.name] for entry in store.entries if entry.name in merged}


def _whole(store: Store, owned: Tensor) -> Tensor:
    if not store.shard:
        return owned
    whole = owned.new_empty(store.gradient.numel())
    done = 0
    for bucket in store.buckets:
        begin, end = bucket.share(True)
        gather(owned[done : done + end - begin], bucket, whole[bucket.begin : bucket.end])
        done += end - begin
    return whole


def _on_index(entry: Entry, state: dict[str, Any]) -> dict[str, Any]:
    """State of one parameter as kept elements of this entry, from those of another index or from dense tensors."""
    positions, shape = state.get("positions"), entry.parameter.shape
    found: dict[str, Any] = {}
    for key, value in state.items():
        if key == "positions":
            continue
        if not isinstance(value, Tensor) or (value.dim() == 0 and (key == "step" or shape != ())):
            found[key] = value
            continue
        value = value.to(entry.parameter.device)
        if positions is not None:
            full = value.new_zeros(entry.parameter.numel())
            full[positions.to(value.device)] = value
        elif value.numel() == entry.parameter.numel():
            full = value.reshape(-1)
        else:
            raise ValueError(
                f"the state's {key!r} of {entry.name!r} has {value.numel():,} elements, the parameter {tuple(shape)}; load "
                "the state of the same model"
            )
        found[key] = entry.read(full, 0, entry.kept)
    return found


def _write_masters(optimizer: Optimizer) -> None:
    """Have 16-bit parameters be their master weights, rounded."""
    for store in optimizer.stores:
        if store.master is None:
            continue
        masters = _whole(store, store.master)
        for entry in store.entries:
            entry.write(masters[entry.start : entry.start + entry.kept].to(entry.parameter.dtype), 0)
