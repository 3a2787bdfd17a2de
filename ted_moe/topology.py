"""Two views of the same ranks: data × tensor for the dense blocks, expert data × expert × tensor for the experts (000, section 7.1).

Tensor groups are the same in both. The data groups of the dense blocks are cut into expert groups, and what is left are the
expert data groups, so

    G_tensor · G_expert · G_data^exp = G_tensor · G_data^nonexp = G    (equation 7.1).

Where experts are not split over the tensor ranks, these take part in the expert groups as other ranks do:
G_expert · G_data^exp = G.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist

from axonn_tp.comm.stalls import BACKWARD
from axonn_tp.grid.timeouts import timeout_of_world

AXES = ("tensor", "data", "expert", "expert_data", "block")


@dataclass(frozen=True)
class Topology:
    """Sizes, and who is in a group with whom.

    Attributes:
        world: ranks.
        tensor: ranks that split a layer; neighbours.
        expert: ranks that have different experts.
        expert_tensor_parallel: whether experts, too, are split over the tensor ranks.

    Raises:
        ValueError: sizes that do not divide; equation 7.1 is in the message.
    """

    world: int
    tensor: int = 1
    expert: int = 1
    expert_tensor_parallel: bool = True

    def __post_init__(self) -> None:
        for name in ("world", "tensor", "expert"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} = {size!r} is not an integer of at least 1; give a number of ranks")
        if self.world % self.tensor:
            raise ValueError(
                f"tensor = {self.tensor} does not divide the {self.world} ranks of this run; choose a divisor of {self.world}"
            )
        if self.world % (self.expert_tensor * self.expert):
            left = self.world // self.expert_tensor
            split = (
                f"tensor = {self.tensor} leaves {left} of {self.world}"
                if self.expert_tensor > 1
                else f"there are {left}"
            )
            raise ValueError(
                f"expert = {self.expert} does not divide the ranks that can hold different experts ({split}); by equation 7.1 "
                f"tensor * expert * expert_data = {self.world}: choose a divisor of {left}"
            )

        if self.expert_tensor == 1 and max(self.expert, self.tensor) % min(self.expert, self.tensor):
            raise ValueError(
                f"expert = {self.expert} with whole experts would cut groups of tensor = {self.tensor} ranks, which must agree on "
                f"capacities; make one a multiple of the other, or split experts over the tensor ranks"
            )

    @property
    def expert_tensor(self) -> int:
        """Ranks that split an expert."""
        return self.tensor if self.expert_tensor_parallel else 1

    @property
    def data(self) -> int:
        """G_data^nonexp: ranks with the same part of the dense blocks."""
        return self.world // self.tensor

    @property
    def expert_data(self) -> int:
        """G_data^exp: ranks with the same part of the same experts."""
        return self.world // (self.expert_tensor * self.expert)

    @property
    def block(self) -> int:
        """Ranks that one rank's tokens can come to: whole tensor and expert groups, neighbours."""
        return self.tensor * self.expert if self.expert_tensor_parallel else max(self.tensor, self.expert)

    def tensor_group(self, rank: int) -> list[int]:
        """The ranks that split layers with `rank`."""
        first = rank - rank % self.tensor
        return list(range(first, first + self.tensor))

    def data_group(self, rank: int) -> list[int]:
        """The ranks that sum dense gradients with `rank`."""
        return list(range(rank % self.tensor, self.world, self.tensor))

    def expert_group(self, rank: int) -> list[int]:
        """The ranks that exchange tokens with `rank`."""
        stride = self.expert_tensor
        first = rank - rank // stride % self.expert * stride
        return list(range(first, first + self.expert * stride, stride))

    def expert_data_group(self, rank: int) -> list[int]:
        """The ranks that sum expert gradients with `rank`."""
        stride = self.expert_tensor * self.expert
        return list(range(rank % stride, self.world, stride))

    def block_group(self, rank: int) -> list[int]:
        """The ranks that must agree with `rank` before any of them sends tokens."""
        first = rank - rank % self.block
        return list(range(first, first + self.block))

    def __str__(self) -> str:
        sizes = f"{self.world} ranks: tensor {self.tensor}, data {self.data}; experts over {self.expert}"
        lines = [
            f"{sizes}, expert data {self.expert_data}" + ("" if self.expert_tensor_parallel else ", whole on each")
        ]
        for name in ("tensor", "data", "expert", "expert_data"):
            find = getattr(self, f"{name}_group")
            groups = sorted({tuple(find(rank)) for rank in range(self.world)})
            lines.append(f"  {name:<12}" + " ".join("{" + " ".join(map(str, group)) + "}" for group in groups))
        return "\n".join(lines)


class Groups:
    """A topology's process groups; every rank makes them. Its axes are "tensor", "data", "expert", "expert_data" and "block".

    Args:
        topology: sizes.
        known: groups that are there already, by axis; the others are made.
        stages: so many such topologies, one after the other, each a pipeline stage; the groups are those of this rank's stage.

    Attributes:
        mixtures: the layers that exchange tokens here, by the number that they give in each exchange (`enrol`).
        meet: asks the others, as the last mixture did before it sent tokens, until backward begins.

    Raises:
        ValueError: as many ranks run as the topology does not have.
    """

    def __init__(
        self, topology: Topology, known: Mapping[str, dist.ProcessGroup] | None = None, stages: int = 1
    ) -> None:
        if topology.world * stages != dist.get_world_size():
            of = "" if stages == 1 else f"{stages} stages of "
            raise ValueError(
                f"{of}the topology has {topology.world} ranks, but {dist.get_world_size()} run; make them equal"
            )
        self.topology = topology
        self._place = dist.get_rank() % topology.world
        self._groups: dict[str, dist.ProcessGroup] = dict(known or {})
        self.mixtures: dict[int, str] = {}
        self.enrol(BACKWARD)
        self.meet: Callable[[int], None] | None = None
        # A block that is one tensor or expert group needs none of its own.
        alike = next((axis for axis in ("tensor", "expert") if self.size(axis) == topology.block), "block")
        wanted = [axis for axis in AXES if axis not in self._groups and (axis != "block" or alike == "block")]
        world = {} if dist.group.WORLD is None else {tuple(range(topology.world * stages)): dist.group.WORLD}
        self._groups |= self._make(wanted, world)
        if alike in self._groups:
            self._groups["block"] = self._groups[alike]

    def _make(
        self, axes: Iterable[str], made: dict[tuple[int, ...], dist.ProcessGroup]
    ) -> dict[str, dist.ProcessGroup]:
        """This rank's groups along axes, of more than one rank; one for the same ranks, and none where one was `made`."""
        world = self.topology.world
        for axis in axes:
            find = getattr(self.topology, f"{axis}_group")
            of_stage = sorted({tuple(find(rank)) for rank in range(world)})
            for first in range(0, dist.get_world_size(), world):
                for group in (tuple(first + rank for rank in ranks) for ranks in of_stage):
                    if group not in made and len(group) > 1:
                        with timeout_of_world():
                            made[group] = dist.new_group(list(group))
        mine = {axis: made.get(tuple(self.ranks(axis))) for axis in axes}
        return {axis: group for axis, group in mine.items() if group is not None}

    def apart(self, axes: Iterable[str]) -> Groups:
        """The same with groups of their own along some axes, for what is under way beside exchanges of tokens; every rank calls it.

        Where two calls share a group all ranks must make them in one order.
        """
        other = copy(self)
        other._groups = {**self._groups, **self._make(tuple(axes), {})}
        return other

    def __deepcopy__(self, memo: dict) -> Groups:
        """Copies of a model share the groups: these cannot be copied."""
        return self

    def enrol(self, name: str) -> int:
        """The number of a mixture in exchanges, by which ranks that call another see it.

        Args:
            name: of the layer, the same on every rank.
        """
        number = zlib.crc32(name.encode())
        self.mixtures[number] = name
        return number

    def group(self, axis: str) -> dist.ProcessGroup:
        """Process group along an axis of more than one rank."""
        return self._groups[axis]

    def size(self, axis: str) -> int:
        """Number of ranks along an axis."""
        return len(getattr(self.topology, f"{axis}_group")(0))

    def rank(self, axis: str) -> int:
        """This rank's place along an axis."""
        return self._find(axis).index(self._place)

    def ranks(self, axis: str) -> list[int]:
        """The ranks of this rank's group along an axis."""
        first = dist.get_rank() - self._place
        return [first + rank for rank in self._find(axis)]

    def _find(self, axis: str) -> list[int]:
        return getattr(self.topology, f"{axis}_group")(self._place)

    def sender(self, axis: str, device: torch.device) -> torch.device:
        """Where a tensor of `device` must be to be sent along an axis: NCCL sends nothing from the CPU."""
        kinds = [entry.partition(":")[0] for entry in dist.get_backend_config(self._groups[axis]).split(",")]
        return (
            device
            if device.type in kinds
            else torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
        )

    def axis_names(self) -> dict[str, str]:
        """Axis by torch's name of its group, for a ledger of what went over which axis."""
        # One group may be that of two axes: what goes over it most names it.
        named = ("block", "expert_data", "data", "expert", "tensor")
        return {self._groups[axis].group_name: axis for axis in named if axis in self._groups}
