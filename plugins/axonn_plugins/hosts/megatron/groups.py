"""The mesh's process groups: Megatron's own where it has them, and more of the kind, with the options that Megatron was given.

| group | is Megatron's | with the options of |
|---|---|---|
| x, y | none, a part of its tensor-parallel group | ``tp`` |
| model: x and y | tensor-parallel | ``tp`` |
| z | expert-parallel | ``ep`` |
| data | expert-data-parallel | ``ep_dp`` |
| batch: z and data | data-parallel | ``dp`` |
| grid: all of a stage | tensor- and data-parallel | ``tp_dp`` |
| tokens: x, z and data | none | none |

Names of options are those of ``--nccl-communicator-config-path`` and ``--high-priority-stream-groups``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from axonn_tp.grid.mesh import AXES, SEVERAL, Grid, Mesh

_ORDER = ("stage", *reversed(AXES))


@dataclass(frozen=True)
class Communicators:
    """What `initialize_model_parallel` was asked for that concerns every group.

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

    Args:
        grid: sizes of the axes.
        device_type: see `Mesh`.
        stages: see `Mesh`.
        communicators: for the groups that Megatron does not have.
    """

    _communicators: Communicators

    def __init__(self, grid: Grid, device_type: str, stages: int, communicators: Communicators) -> None:
        object.__setattr__(self, "_communicators", communicators)
        super().__init__(grid, device_type, stages)

    def destroy(self) -> None:
        """Forget the groups."""
        self._groups.clear()

    def _make_groups(self, stages: int) -> dict[str, dist.ProcessGroup]:
        groups = {
            "model": parallel_state.get_tensor_model_parallel_group(),
            "z": parallel_state.get_expert_model_parallel_group(),
            "data": parallel_state.get_expert_data_parallel_group(),
            "batch": parallel_state.get_data_parallel_group(),
            "grid": parallel_state.get_tensor_and_data_parallel_group(),
        }
        for name, axes, like in (("x", ("x",), "tp"), ("y", ("y",), "tp"), ("tokens", SEVERAL["tokens"], "")):
            groups[name] = self._group(name, axes, like, groups, stages)
        for name, axes in (*((axis, (axis,)) for axis in AXES), *SEVERAL.items()):
            assert dist.get_process_group_ranks(groups[name]) == next(
                ranks for ranks in _lists(self.grid, stages, axes) if dist.get_rank() in ranks
            ), name
        return groups

    def _group(
        self, name: str, axes: tuple[str, ...], like: str, known: Mapping[str, dist.ProcessGroup], stages: int
    ) -> dist.ProcessGroup:
        """One of the same ranks where there is one, or a new one; all ranks of the run call it."""
        lists = list(_lists(self.grid, stages, axes))
        mine = next(ranks for ranks in lists if dist.get_rank() in ranks)
        for group in known.values():
            if dist.get_process_group_ranks(group) == mine:
                return group
        made = {}
        for ranks in lists:
            options = parallel_state.get_nccl_options(like, self._communicators.options)
            # By Megatron's function, so that --distributed-timeout-seconds-after-init finds it.
            made[tuple(ranks)] = parallel_state.create_group(
                ranks, timeout=self._communicators.timeout, pg_options=options, group_desc=f"AXONN_{name.upper()}"
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
