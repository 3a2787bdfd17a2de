"""The mesh's process groups: Megatron's own where it has them, and more of the kind, with the options that Megatron was given.

| group | is Megatron's | with the options of |
|---|---|---|
| x, y | none, a part of its tensor-parallel group | ``tp`` |
| model: x and y | tensor-parallel | ``tp`` |
| z | expert-parallel, where experts lie no further | ``ep`` |
| data | expert-data-parallel, likewise | ``ep_dp`` |
| experts, and their data | expert-parallel and expert-data-parallel, where z lies no further | ``ep``, ``ep_dp`` |
| batch: z and data | data-parallel, with context-parallel where sequences are shared | ``dp``, ``dp_cp`` |
| grid: all of a stage | tensor- and data-parallel, likewise | ``tp_dp``, ``tp_dp_cp`` |
| sequence: ranks within batch that share one | context-parallel | ``cp`` |
| readers: ranks within batch that read different samples | data-parallel | ``dp`` |
| alone: this rank | one of size 1, where there is one | none |
| tokens: x, z and data | none | none |

Names of options are those of ``--nccl-communicator-config-path`` and ``--high-priority-stream-groups``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from axonn_plugins.hosts.megatron.expert_groups import blocks_of, in_stages
from axonn_tp.grid.mesh import AXES, SEVERAL, Grid, Mesh
from ted_moe.topology import AXES as EXPERT_AXES
from ted_moe.topology import Groups, Topology

_ORDER = ("stage", *reversed(AXES))


@dataclass(frozen=True)
class Communicators:
    """Arguments of `initialize_model_parallel` that concern every group.

    Attributes:
        timeout: of collectives.
        options: NCCL's, by Megatron's name of a group.
    """

    timeout: timedelta
    options: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Communicators:
        """Read them from the arguments of Megatron's `initialize_model_parallel`.

        Raises:
            ValueError: SHARP, of which the groups that sum gradients here would have no part.
        """
        if arguments.get("use_sharp"):
            raise ValueError(
                "use_sharp = True cannot be combined with axonn3d, whose weights' gradients are summed over another group than the one "
                "that SHARP is turned on for; leave it out"
            )
        options: dict[str, dict[str, Any]] = {}
        path = arguments.get("nccl_communicator_config_path")
        if path is not None:
            import yaml

            options = yaml.safe_load(Path(path).read_text()) or {}
        for name in arguments.get("high_priority_stream_groups") or ():
            options.setdefault(name, {})["is_high_priority_stream"] = True
        return cls(timedelta(minutes=arguments["distributed_timeout_minutes"]), options)


class MegatronMesh(Mesh):
    """A mesh in Megatron's groups, which must be there; Megatron gives them back.

    Besides those of a mesh it has the group ``"between"``, over which what Megatron has summed is summed again (`Blocks.between`).

    Args:
        grid: sizes of the axes.
        device_type: see `Mesh`.
        stages: see `Mesh`.
        communicators: for the groups that Megatron does not have.
        topology: of experts.

    Attributes:
        experts: their groups.
    """

    experts: Groups
    _communicators: Communicators
    _topology: Topology

    def __init__(
        self, grid: Grid, device_type: str, stages: int, communicators: Communicators, topology: Topology
    ) -> None:
        object.__setattr__(self, "_communicators", communicators)
        object.__setattr__(self, "_topology", topology)
        super().__init__(grid, device_type, stages)

    def destroy(self) -> None:
        """Forget the groups."""
        self._groups.clear()

    def size(self, axis: str) -> int:
        """Number of ranks of a group."""
        return self._groups[axis].size()

    def rank(self, axis: str) -> int:
        """This rank's place in a group."""
        return self._groups[axis].rank()

    def axis_names(self) -> dict[str, str]:
        """As a mesh's, and where ranks share sequences the group of these."""
        shared = {self._groups["sequence"].group_name: "sequence"} if self.size("sequence") > 1 else {}
        return super().axis_names() | shared

    def _about_samples(self, stages: int) -> dict[str, dist.ProcessGroup]:
        return {"replicas": self._groups["model"]}

    def _make_groups(self, stages: int) -> dict[str, dist.ProcessGroup]:
        sequence = parallel_state.get_context_parallel_group()
        shared = sequence.size() > 1
        groups = {
            "model": parallel_state.get_tensor_model_parallel_group(),
            "batch": parallel_state.get_data_parallel_group(with_context_parallel=shared),
            "grid": parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=shared),
        }
        theirs = [
            parallel_state.get_expert_model_parallel_group(),
            parallel_state.get_expert_data_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        ]
        if not shared:
            # One of more ranks is attention's, so that what it sends waits for no weight.
            theirs.append(sequence)
        likes = {"x": "tp", "y": "tp", "z": "ep", "data": "ep_dp"}
        for name, axes in (*((axis, (axis,)) for axis in AXES), ("tokens", SEVERAL["tokens"])):
            lists = list(_lists(self.grid, stages, axes))
            groups[name] = self._group(name, lists, likes.get(name, ""), [*theirs, *groups.values()])
        for name, axes in (*((axis, (axis,)) for axis in AXES), *SEVERAL.items()):
            assert dist.get_process_group_ranks(groups[name]) == next(
                ranks for ranks in _lists(self.grid, stages, axes) if dist.get_rank() in ranks
            ), name
        self._deal_experts(groups, theirs, stages)
        alone = [[rank] for rank in range(dist.get_world_size())]
        groups["alone"] = self._group("alone", alone, "", [*theirs, *groups.values()])
        groups |= {"sequence": sequence, "readers": parallel_state.get_data_parallel_group()}
        return groups

    def _deal_experts(self, groups: dict[str, dist.ProcessGroup], theirs: list[dist.ProcessGroup], stages: int) -> None:
        """Make the groups of experts, and the one between."""
        topology, world, known = self._topology, self.grid.world, [*theirs, *groups.values()]
        found: dict[str, dist.ProcessGroup] = {}
        for axis, like in zip(EXPERT_AXES, ("tp", "dp", "ep", "ep_dp", "ep"), strict=True):
            of_stage = sorted({tuple(getattr(topology, f"{axis}_group")(rank)) for rank in range(world)})
            found[axis] = self._group(f"expert_{axis}", in_stages(of_stage, world, stages), like, known)
            known.append(found[axis])
        between = blocks_of(self.grid, topology).lists_between(world)
        groups["between"] = self._group("between", in_stages(between, world, stages), "dp", known)
        object.__setattr__(self, "experts", Groups(topology, found, stages))

    def _group(
        self, name: str, lists: Sequence[Sequence[int]], like: str, known: Iterable[dist.ProcessGroup]
    ) -> dist.ProcessGroup:
        """One of the same ranks where there is one, or a new one; all ranks of the run call it."""
        mine = next(list(ranks) for ranks in lists if dist.get_rank() in ranks)
        for group in known:
            if dist.get_process_group_ranks(group) == mine:
                return group
        made = {}
        for ranks in lists:
            options = parallel_state.get_nccl_options(like, self._communicators.options)
            # By Megatron's function, so that --distributed-timeout-seconds-after-init finds it.
            made[tuple(ranks)] = parallel_state.create_group(
                list(ranks), timeout=self._communicators.timeout, pg_options=options, group_desc=f"AXONN_{name.upper()}"
            )
        return made[tuple(mine)]


def _lists(grid: Grid, stages: int, axes: tuple[str, ...]) -> Iterator[list[int]]:
    """Ranks of every group over some axes, given outermost first."""
    sizes = {"stage": stages, **{axis: grid.size(axis) for axis in AXES}}
    others = [axis for axis in _ORDER if axis not in axes]
    for outer in product(*(range(sizes[axis]) for axis in others)):
        places = [
            dict(zip((*others, *axes), (*outer, *inner), strict=True))
            for inner in product(*(range(sizes[axis]) for axis in axes))
        ]
        yield [place.pop("stage") * grid.world + grid.rank(**place) for place in places]
