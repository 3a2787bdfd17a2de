"""Bytes that stores and a step on them take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from axonn_plugins.optim.store import Store
from axonn_plugins.optim.tiles import Slots, slot_bytes


def state_bytes(stores: Iterable[Store], state: Mapping[Tensor, Mapping[str, Any]]) -> int:
    """Bytes of weights, gradients, indices and states, on the device and in host memory."""
    held = sum(value.nbytes for values in state.values() for value in tree_leaves(values) if isinstance(value, Tensor))
    return held + sum(store.nbytes + sum(entry.parameter.nbytes for entry in store.entries) for store in stores)


def host_bytes(stores: Iterable[Store]) -> int:
    """Bytes in host memory: master weights and states."""
    return sum(
        sum(state.nbytes for state in store.states.values()) + (0 if store.master is None else store.master.nbytes)
        for store in stores
        if store.host
    )


def visiting_bytes(store: Store, elements: int) -> int:
    """Bytes of a slot, in which a tile of so many elements visits the device."""
    wide = torch.promote_types(store.dtype, torch.float32)
    dtypes = [wide, wide, *(state.dtype for state in store.states.values()), store.dtype]
    return slot_bytes(elements, *dtypes)


def step_bytes(stores: Iterable[Store], tile_size: int) -> int:
    """Bytes that a step has on a device besides, where states are in host memory."""
    needs = (visiting_bytes(store, min(tile_size, store.owned)) for store in stores if store.host)
    return Slots.count * max(needs, default=0)
