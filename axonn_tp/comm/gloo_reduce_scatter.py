"""A reduce-scatter for gloo that sends every rank its share alone.

Gloo's own sums the whole on all ranks and drops all but a share: twice the bytes of equation 5.3. Here the ranks exchange
shares, an all-to-all, and each adds up its own: once, in the order of the ranks and, of 16 bits, in float32. An all-to-all takes no
account of nodes, as rings do: where a node has several of the group's ranks, each sends to the other nodes, which may be more.
"""

from __future__ import annotations

import os
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

_decided: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()
_library = torch.library.Library("axonn", "FRAGMENT")
# An operator of its own, so that dispatch modes see the one reduce-scatter that it is.
_library.define("reduce_scatter_parts(Tensor input, int group_size, str group_name) -> Tensor")


def _parts(input: Tensor, group_size: int, group_name: str) -> Tensor:
    rows = [input.shape[0] // group_size] * group_size
    return torch.ops._c10d_functional.all_to_all_single(input, rows, rows, group_name)


_library.impl("reduce_scatter_parts", _parts, "CPU")


def on_gloo(group: dist.ProcessGroup, tensor: Tensor) -> bool:
    """True if gloo carries tensors like this one between the group's ranks."""
    return group._get_backend(tensor.device).name() == "gloo"


def fewer_in_parts(group: dist.ProcessGroup, tensor: Tensor) -> bool:
    """True if fewer bytes go over nodes' links where the group exchanges shares: on gloo, as the first of its ranks finds; all agree."""
    if not on_gloo(group, tensor):
        return False
    if group not in _decided:
        store, key = dist.distributed_c10d._get_process_group_store(group), "axonn sums in parts"
        if group.rank() == 0:
            members = dist.get_process_group_ranks(group)
            local = int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())
            near = sum(member // local == members[0] // local for member in members)
            store.set(key, str(int(less_between_nodes(near, len(members)))))
        _decided[group] = store.get(key) == b"1"
    return _decided[group]


def less_between_nodes(near: int, ranks: int) -> bool:
    """True if an all-to-all sends less from a node than the ring of an all-reduce does.

    Args:
        near: ranks of the group on each node.
        ranks: of the group.
    """
    return near * (ranks - near) < 2 * (ranks - 1)


def start_parts(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Begin to fetch this rank's share of dim 0, a contiguous multiple of the group's size, from all ranks: as long as `tensor`."""
    return torch.ops.axonn.reduce_scatter_parts(tensor, group.size(), group.group_name)


def sum_parts(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The share, of what `start_parts` fetched."""
    return parts.unflatten(0, (group.size(), -1)).sum(0)
