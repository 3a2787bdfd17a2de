"""Let pccl do a device's collectives of a job's group of all ranks that was made with another backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from axonn_plugins.observe.clock import elapsed
from axonn_plugins.pccl import device_tuner, register
from axonn_plugins.pccl.backend import create, options_of_world
from axonn_plugins.pccl.options import Options


@dataclass
class _Taken:
    """The attributes needed to go back and forth."""

    device: torch.device
    options: Options
    names: tuple[str, str]
    theirs: Any
    ours: Any
    bound: torch.device | None


_taken: WeakKeyDictionary[dist.ProcessGroup, _Taken] = WeakKeyDictionary()


def take(options: Options, kind: str = "cpu") -> bool:
    """Have pccl do the collectives of the group of all ranks, and of groups made after it; all ranks call this.

    Args:
        options: those of the group, and of the groups that inherit from it.
        kind: of the tensors whose collectives they are, "cpu" or "cuda".

    Returns:
        Whether that is new.

    Raises:
        ValueError: the group is pccl's already, with other options, or has no backend for such tensors.
    """
    register()
    world = c10d._get_default_group()
    name, store = c10d._world.pg_map[world]
    devices = c10d.BackendConfig(c10d.Backend(name)).get_device_backend_map()
    before = _taken.get(world)
    if devices.get(kind) == "pccl":
        have = before.options if before else options_of_world()
        if have != options:
            raise ValueError(
                f"the process group is pccl's already, with {have}, which cannot become {options}; choose the options once in a job"
            )
        return False
    if before and before.options != options:
        raise ValueError(
            f"pccl was used with {before.options}, which cannot become {options}; choose the options once in a job"
        )
    if kind not in devices:
        beside = "cpu:gloo" if kind == "cpu" else "cuda:nccl"
        raise ValueError(
            f"the process group's backend {name} has nothing for {kind.upper()} tensors, whose collectives would be pccl's; "
            f'make the group with "{beside}" beside it, or leave pccl out'
        )
    device = torch.device(kind)
    theirs = world._get_backend(device)
    ours = before.ours if before else create(_describe(world, store, theirs, kind), options)
    alone = set(devices.values()) == {devices[kind]} and kind == "cpu"
    names = ("pccl" if alone else _joined(devices | {kind: "pccl"}), name)
    _taken[world] = _Taken(device, options, names, theirs, ours, world.bound_device_id)
    # Of a world that was told its device torch splits groups, which ours, that are made, cannot be.
    world.bound_device_id = None if kind != "cpu" else world.bound_device_id
    _switch(world, device, names[0], ours, dist.ProcessGroup.BackendType.CUSTOM)
    if kind != "cpu" and options.algorithm == "auto" and options.tunes() and not before and world.size() > 1:
        with elapsed("timing pccl beside the device's own library"):
            device_tuner.tune(world, device_tuner.SIZES, kind)
    return True


def give_back() -> bool:
    """Undo `take`; whether there was something to undo. Groups made meanwhile stay as they are."""
    if not dist.is_initialized():
        return False
    world = c10d._get_default_group()
    taken = _taken.get(world)
    if taken is None or c10d._world.pg_map[world][0] != taken.names[0]:
        return False
    world.bound_device_id = taken.bound
    _switch(world, taken.device, taken.names[1], taken.theirs, c10d.Backend.backend_type_map[taken.theirs.name()])
    return True


def _joined(devices: dict[str, str]) -> str:
    return ",".join(f"{device}:{backend}" for device, backend in devices.items())


def _describe(world: dist.ProcessGroup, store: dist.Store, theirs: Any, kind: str) -> Any:
    """The description by which torch would introduce a new group of all ranks to the backend."""
    described = c10d._DistributedBackendOptions()
    described.store = dist.PrefixStore("axonn/", store)
    if kind != "cpu":  # by which `create` knows for whom it is asked
        described.store = dist.PrefixStore(f"{kind}/", described.store)
    described.group_rank, described.group_size = world.rank(), world.size()
    described.timeout = (
        theirs.options._timeout if hasattr(theirs, "options") else c10d._get_default_timeout(c10d.Backend("nccl"))
    )
    described.group_id = world.group_name
    described.global_ranks_in_group = []
    return described


def _switch(world: dist.ProcessGroup, device: torch.device, name: str, backend: Any, kind: Any) -> None:
    named, described = world.group_name, world.group_desc
    world._register_backend(device, kind, backend)
    world._set_default_backend(kind)
    # A group's name is that of one of its backends, by which a mesh finds the group.
    world._set_group_name(named)
    world._set_group_desc(described)
    # Groups made from now on inherit the name.
    c10d._world.pg_map[world] = (name, c10d._world.pg_map[world][1])
    c10d._world.pg_backend_config[world] = str(c10d.BackendConfig(c10d.Backend(name)))
