"""TED where a script has tensor parallelism of its own and gives DeepSpeed its model parallel unit (mpu).

Dense layers are the script's. MoE layers become TED's on the unit's groups; all else, norms and checkpoints too, is stock
DeepSpeed's, which keeps a file for each tensor rank.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups as tables
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group
from torch import nn

from axonn_plugins.config import Ted
from axonn_plugins.deepspeed.agreement import agree, check_shapes, facts_of
from axonn_plugins.deepspeed.recompute import Stashes
from axonn_plugins.deepspeed.ted_layers import adopt, expert_ranks, stock_layers
from axonn_tp import layout_of
from ted_moe import Groups, Topology


class TedUnitEngine(DeepSpeedEngine):
    """DeepSpeed's engine, its MoE layers TED's."""

    def __init__(
        self, args: Any, model: nn.Module, optimizer: Any = None, *rest: Any, config_class: Any = None, **keywords: Any
    ) -> None:
        block: Ted = config_class.axonn.ted
        layers, mpu, problem = stock_layers(model), keywords["mpu"], None
        try:
            check_shapes(model)
            topology = _topology(mpu, expert_ranks(layers), block)
        except ValueError as error:
            problem = f"axonn.ted: {error}"
        agree(problem, {} if problem else facts_of(model, config_class.axonn_raw, optimizer, keywords))
        known = {"tensor": bwc_tensor_model_parallel_group(mpu), "data": mpu.get_data_parallel_group()}
        self._groups = Groups(topology, known)
        _register(f"ep_size_{topology.expert}", self._groups)
        for layer in layers.values():
            adopt(layer, self._groups, block)
            for parameter in layer.local.parameters():  # type: ignore[union-attr]
                # DeepSpeed's norm counts what is not marked on the first tensor rank only.
                parameter.tensor_model_parallel = bool(layout_of(parameter).split)
        if dist.get_rank() == 0:
            print(f"axonn: TED on the mpu's groups\n{topology}", file=sys.stderr, flush=True)
        self._stashes = Stashes(block.stash) if block.communication_aware_checkpointing else None
        super().__init__(args, model, optimizer, *rest, config_class=config_class, **keywords)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's forward; checkpointed blocks keep what they communicate."""
        if self._stashes is None or not torch.is_grad_enabled():
            return super().forward(*inputs, **keywords)
        with self._stashes.recording():
            return super().forward(*inputs, **keywords)


def _topology(mpu: Any, expert: int, block: Ted) -> Topology:
    """The unit's tensor and data groups as TED's.

    Raises:
        ValueError: they are others.
    """
    group = bwc_tensor_model_parallel_group(mpu)
    tensor = sorted(dist.get_process_group_ranks(group))
    data = sorted(dist.get_process_group_ranks(mpu.get_data_parallel_group()))
    world, rank = dist.get_world_size(), dist.get_rank()
    if len(tensor) * len(data) != world:
        raise ValueError(
            f"the mpu has {len(tensor)} tensor ranks and {len(data)} data ranks of {world}; TED knows no pipeline stages: use "
            "as many as tensor * data ranks"
        )
    topology = Topology(world, len(tensor), expert, block.expert_tensor_parallel)
    for name, ranks, wanted in (
        ("tensor", tensor, topology.tensor_group(rank)),
        ("data", data, topology.data_group(rank)),
    ):
        if ranks != wanted:
            raise ValueError(
                f"rank {rank}'s {name} group in the mpu is {ranks}, and TED's is {wanted}, for tensor ranks are neighbours; "
                "order the ranks of the mpu so, as Megatron does"
            )
    return topology


def _register(name: str, groups: Groups) -> None:
    """Where DeepSpeed looks for the groups of experts."""
    alone = None
    for axis in ("expert", "expert_data"):
        if groups.size(axis) == 1 and alone is None:
            every = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
            alone = every[dist.get_rank()]
    for axis, table, ranks in (
        ("expert", tables._EXPERT_PARALLEL_GROUP, tables._EXPERT_PARALLEL_GROUP_RANKS),
        ("expert_data", tables._EXPERT_DATA_PARALLEL_GROUP, tables._EXPERT_DATA_PARALLEL_GROUP_RANKS),
    ):
        group = groups.group(axis) if groups.size(axis) > 1 else alone
        assert group is not None
        table[name], ranks[name] = group, dist.get_process_group_ranks(group)
