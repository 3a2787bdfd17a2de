"""The state of stores by parameter: read whole from any number of ranks that share it, and put where they keep it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_plugins.optim.gathering import gather, gather_weights
from axonn_plugins.optim.index import Index
from axonn_plugins.optim.store import Bucket, Entry, Segment, Store
from axonn_plugins.optim.tiles import settle
from axonn_tp import Mesh, layout_of
from axonn_tp.comm.optimizer_trial import BY_ELEMENT

_SHARDS = "shards"
MASTER = "master"
"""The name of float32 weights beside the optimizer's own names."""
WHOLE = "whole"
"""The name of a dict of the states that are neither numbers nor of the parameter's shape, such as Adafactor's: every rank has all of them."""


Kinds = dict[str, dict[str, torch.dtype]]
"""For each parameter, by name, the types of its states that are vectors of kept elements."""


def load_masters(stores: list[Store], size: int) -> None:
    """Take the master weights from the parameters; those that round to theirs stay.

    Args:
        stores: all of them.
        size: elements read at a time.
    """
    for store in stores:
        for segment in store.segments if store.master is not None else ():
            _load_master(segment, size)


def _load_master(segment: Segment, size: int) -> None:
    entry = segment.entry
    for done, weights in zip(range(0, segment.length, size), segment.weights.split(size), strict=True):
        begin = segment.begin + done
        # What is on its way to host memory is there when the host has this.
        low = entry.read(entry.flat, begin, begin + weights.numel()).to(weights.device)
        weights.copy_(torch.where(weights.to(low.dtype) == low, weights, low))


def read_state(
    stores: list[Store], state: Mapping[Tensor, Mapping[str, Any]], device: torch.device | None = None
) -> dict[Entry, dict[str, Any]]:
    """All state of every entry, on every rank; where it is shared every rank calls it.

    Args:
        stores: all of them.
        state: the optimizer's, by `Segment.weights`.
        device: where it goes, a bucket at a time; None: where it is.

    Returns:
        By entry, copies: "positions" of its kept elements where others are pruned, "master" for 16-bit parameters, and what
        the optimizer has of it, vectors of kept elements; see `WHOLE`.
    """
    settle(store.device for store in stores if store.host)
    found: dict[Entry, dict[str, Any]] = {}
    for store in stores:
        mine: dict[Bucket, list[Segment]] = {bucket: [] for bucket in store.buckets}
        owners = {entry: bucket for bucket in store.buckets for entry in bucket.entries}
        for segment in store.segments:
            mine[owners[segment.entry]].append(segment)
        for bucket, values, kinds in agreed(store, state):
            keys = keys_of(bucket, kinds, store)
            vectors = {key: _whole(key, dtype, bucket, mine[bucket], state, store) for key, dtype in keys.items()}
            for entry in bucket.entries:
                read: dict[str, Any] = {} if entry.index is None else {"positions": _positions(entry.index)}
                for key, vector in vectors.items():
                    if key == MASTER or key in kinds.get(entry.name, {}):
                        read[key] = bucket.of(entry, vector).to(device or vector.device, copy=True)
                found[entry] = read | copy.deepcopy(values.get(entry.name, {}))
    return found


def _positions(index: Index) -> Tensor:
    """In 32 bits where these number the tensor's elements."""
    return index.positions() if index.numel > 2**31 else index.positions().int()


def dense_parts(
    stores: list[Store], state: Mapping[Tensor, Mapping[str, Any]]
) -> dict[Entry, tuple[int, int, dict[str, Any]]]:
    """This rank's part of every entry's state, in host memory; where it is shared every rank calls it, and nothing is gathered.

    Args:
        stores: all of them.
        state: the optimizer's, by `Segment.weights`.

    Returns:
        By entry, first element and length of its part of the flattened dense parameter, and the state: vectors of this length with
        zeros where elements are pruned, and what is one value a parameter.
    """
    settle(store.device for store in stores if store.host)
    found: dict[Entry, tuple[int, int, dict[str, Any]]] = {}
    for store in stores:
        held = {segment.entry: segment for segment in store.segments}
        for bucket, values, kinds in agreed(store, state):
            for entry in bucket.entries:
                of_entry = kinds.get(entry.name, {}) | ({} if store.master is None else {MASTER: torch.float32})
                found[entry] = _dense_part(entry, held.get(entry), values.get(entry.name, {}), of_entry, state)
    for entry, (_, length, read) in found.items():
        if not entry.kept:  # no step has made a state of nothing: that of another of its group, with zeros
            others = (other for each, (_, _, other) in found.items() if each.group == entry.group and each.kept)
            for key, value in next(filter(None, others), {}).items():
                vector = isinstance(value, Tensor) and value.dim() == 1
                read.setdefault(key, torch.zeros(length, dtype=value.dtype) if vector else value)
    return found


def _dense_part(
    entry: Entry,
    segment: Segment | None,
    values: Mapping[str, Any],
    kinds: Mapping[str, torch.dtype],
    state: Mapping[Tensor, Mapping[str, Any]],
) -> tuple[int, int, dict[str, Any]]:
    whole = not entry.kept and (entry.process_group is None or dist.get_rank(entry.process_group) == 0)
    low, high = (0, entry.parameter.numel()) if whole else (0, 0)
    places: Tensor | slice = slice(0)
    if segment is not None:
        low, high = segment.begin, segment.begin + segment.length
        places = slice(high - low)
        if entry.index is not None:
            # What is pruned between two ranks' elements goes with those before it.
            kept = entry.index.positions().long().cpu()
            first, end = low, high
            low = 0 if first == 0 else int(kept[first])
            high = entry.parameter.numel() if end == entry.kept else int(kept[end])
            places = kept[first:end] - low
    read = dict(values)
    for key, dtype in kinds.items():
        read[key] = torch.zeros(high - low, dtype=dtype)
        value = segment and (segment.weights if key == MASTER else state.get(segment.weights, {}).get(key))
        if isinstance(value, Tensor):
            read[key][places] = value.cpu()
    return low, high - low, read


def write_state(
    stores: list[Store],
    optimizer: torch.optim.Optimizer,
    read: Mapping[Entry, Mapping[str, Any]],
    size: int,
) -> None:
    """Take up what `read_state` gave on these or other ranks, and have 16-bit parameters be their master weights, rounded.

    Without master weights in it these are taken from the parameters.

    Args:
        stores: all of them.
        optimizer: its state is replaced.
        read: by entry, vectors of this entry's kept elements; see `on_index`.
        size: elements written at a time.
    """
    optimizer.state.clear()
    for store in stores:
        store.states.clear()
        for segment in store.segments:
            options = optimizer.param_groups[segment.entry.group]
            mine: dict[str, Any] = {}
            for key, value in read[segment.entry].items():
                if isinstance(value, Tensor) and value.dim() == 1:
                    # Of the device: what is on its way to host memory is there when this has come.
                    part = value[segment.begin : segment.begin + segment.length]
                    if key != MASTER:
                        kept = store.state_of(key, segment, part.dtype) if store.host else torch.empty_like(part)
                        mine[key] = kept.copy_(part)
                    elif store.master is not None:
                        segment.weights.copy_(part)
                else:
                    mine[key] = own_value(value, store, options)
            if mine:
                optimizer.state[segment.weights] = mine
            if store.master is not None and MASTER not in read[segment.entry]:
                _load_master(segment, size)
            if store.master is not None:
                for done in range(0, segment.length, size):
                    weights = segment.weights[done : done + size].to(store.device)
                    segment.entry.write(weights.to(store.dtype), segment.begin + done)
    gather_weights([store for store in stores if store.master is not None], size)


def on_index(entry: Entry, state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State of one parameter as kept elements of this entry, from those of another index or from dense tensors.

    Args:
        entry: the parameter's.
        state: as it was saved.
        optimizer: that is to take it.

    Raises:
        ValueError: it is of another shape.
    """
    positions, shape = state.get("positions"), entry.parameter.shape
    found: dict[str, Any] = {}
    for key, value in state.items():
        if key == "positions":
            continue
        if not isinstance(value, Tensor) or (value.dim() == 0 and (key == "step" or shape != ())):
            found[key] = value
            continue
        value = value.to(entry.parameter.device, _kind(value, entry, state, optimizer))
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


def _kind(value: Tensor, entry: Entry, state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> torch.dtype:
    """In which type a state is kept: that of the weights which are stepped where an optimizer that stepped others has saved it."""
    wide = torch.promote_types(entry.parameter.dtype, torch.float32)
    # Torch's own have states in their weights' type; what others keep in 16 bits beside float32 weights is their choice.
    own = type(optimizer) in BY_ELEMENT or type(optimizer) is getattr(torch.optim, "Muon", None)
    of_low = value.dtype == entry.parameter.dtype and MASTER not in state
    return wide if value.is_floating_point() and (own or of_low) else value.dtype


def shards_of(entries: Iterable[Entry], mesh: Mesh | None) -> dict[str, list[str]]:
    """Under "shards" in words which shards of split parameters this rank has; nothing where none is split."""
    if mesh is None:
        return {}
    found = set()
    for layout in {layout_of(entry.parameter) for entry in entries}:
        on = mesh.over(layout.grid)
        found |= {f"{on.rank(axis)} of {on.size(axis)} over {axis}" for axis in layout.axes if on.size(axis) > 1}
    return {_SHARDS: sorted(found)} if found else {}


def _check_shards(given: dict[str, str] | None, here: dict[str, str] | None) -> None:
    """Refuse the state of another rank's shards, whose sizes may be this rank's."""
    if given is not None and given != here:
        raise ValueError(
            f"the state is of weights' shards {', '.join(given)}, and this rank has {', '.join(here) if here else 'whole weights'}; have each "
            "rank save its own state, and load it on the same grid"
        )


def by_parameter(
    given: Mapping[str, Any], parameters: Sequence[nn.Parameter], groups: int, shards: Mapping[str, Any]
) -> tuple[dict[nn.Parameter, dict[str, Any]], list[dict[str, Any]]]:
    """An optimizer's state for each parameter, and its groups.

    Args:
        given: what a `state_dict` returned.
        parameters: of the optimizer that is to take it.
        groups: how many it has.
        shards: what `shards_of` says of it.

    Raises:
        ValueError: it is of other parameters, or of another rank's shards of them.
    """
    _check_shards(given.get(_SHARDS), shards.get(_SHARDS))
    found = given["param_groups"]
    order = [number for group in found for number in group["params"]]
    if len(order) != len(parameters) or len(found) != groups:
        raise ValueError(
            f"the state is of {len(order)} parameters in {len(found)} groups, the optimizer has "
            f"{len(parameters)} in {groups}; make it over the same model"
        )
    return {p: given["state"].get(number, {}) for number, p in zip(order, parameters, strict=True)}, found


def agreed(
    store: Store, state: Mapping[Tensor, Mapping[str, Any]]
) -> list[tuple[Bucket, dict[str, dict[str, Any]], Kinds]]:
    """For each bucket what is one value a parameter, by name, and the types of its vectors; also of other ranks' parts."""
    owners = {entry: bucket for bucket in store.buckets for entry in bucket.entries}
    mine: dict[dist.ProcessGroup | None, tuple[dict[str, dict[str, Any]], Kinds]] = {}
    groups = {bucket: bucket.process_group if bucket.sharded else None for bucket in store.buckets}
    for group in groups.values():
        mine.setdefault(group, ({}, {}))
    for segment in store.segments:
        values, kinds = mine[groups[owners[segment.entry]]]
        for key, value in state.get(segment.weights, {}).items():
            known, vectors = values.setdefault(segment.entry.name, {}), kinds.setdefault(segment.entry.name, {})
            if isinstance(value, Tensor) and value.shape == (segment.length,):
                vectors[key] = value.dtype
            else:
                known[key] = value
    for group, (values, kinds) in mine.items():
        if group is not None:
            every: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(every, (values, kinds), group=group)
            for theirs, of_theirs in every:
                values |= theirs
                kinds |= of_theirs
    return [(bucket, *mine[group]) for bucket, group in groups.items()]


def keys_of(bucket: Bucket, kinds: Kinds, store: Store) -> dict[str, torch.dtype]:
    """The vectors that a bucket's entries have, master weights among them, in one order on all ranks."""
    found = {MASTER: torch.float32} if store.master is not None else {}
    for entry in bucket.entries:
        found |= kinds.get(entry.name, {})
    return dict(sorted(found.items()))


def own_value(value: Any, store: Store, options: Mapping[str, Any]) -> Any:
    """A copy of what is one value a parameter; fused and capturable optimizers count steps on the device."""
    beside = store.device if options.get("fused") or options.get("capturable") else None
    return value.to(beside, copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def _whole(
    key: str,
    dtype: torch.dtype,
    bucket: Bucket,
    segments: list[Segment],
    state: Mapping[Tensor, Mapping[str, Any]],
    store: Store,
) -> Tensor:
    """A bucket's state, zeros where a parameter has none."""
    begin, end = bucket.share
    device = torch.device("cpu") if store.host and not bucket.sharded else store.device
    share = torch.zeros(end - begin, dtype=dtype, device=device)
    for segment in segments:
        value = segment.weights if key == MASTER else state.get(segment.weights, {}).get(key)
        if value is not None:
            share[segment.owned - bucket.owned :][: segment.length] = value
    whole = gather(share, bucket)
    return whole.cpu() if store.host else whole
