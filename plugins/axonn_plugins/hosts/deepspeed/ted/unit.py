"""TED where a script has tensor parallelism of its own and gives DeepSpeed its model parallel unit (mpu).

Dense layers are the script's. MoE layers become TED's on the unit's groups; all else, norms and checkpoints too, is stock
DeepSpeed's, which keeps a file for each tensor rank. Experts that the script has split itself, as Megatron-DeepSpeed does, stay as
they are, with their own sums over the tensor ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE as StockMoE
from deepspeed.utils import groups as tables
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group
from torch import nn

from axonn_plugins.config import ConfigError, Ted
from axonn_plugins.hosts.deepspeed.agreement import agree, check_shapes, facts_of
from axonn_plugins.hosts.deepspeed.checkpoint.checked import CheckedCheckpoints
from axonn_plugins.hosts.deepspeed.labels import MaskedLabels, mask_of
from axonn_plugins.hosts.deepspeed.sections import needs_whole_matrices
from axonn_plugins.hosts.deepspeed.ted.experts import (
    Weights,
    exchange_weights,
    kept,
    refuse_others,
    same_on_tensor_ranks,
)
from axonn_plugins.hosts.deepspeed.ted.layers import adopt, expert_ranks, stock_layers
from axonn_plugins.hosts.deepspeed.ted.recompute import Stashes
from axonn_plugins.hosts.deepspeed.ted.tables import Tables
from axonn_tp import layout_of
from axonn_tp.layers.exports import as_shards
from ted_moe import Groups, Topology


class TedUnitEngine(CheckedCheckpoints, MaskedLabels):
    """DeepSpeed's engine, its MoE layers TED's."""

    def __init__(
        self, args: Any, model: nn.Module, optimizer: Any = None, *rest: Any, config_class: Any = None, **keywords: Any
    ) -> None:
        block: Ted = config_class.axonn.ted
        layers, mpu, problem = stock_layers(model), keywords["mpu"], None
        facts: dict[str, str] = {}
        try:
            check_shapes(model)
            mask_of(config_class.axonn, model)
            expert, tensor, split = expert_ranks(layers), _tensor_ranks(mpu), _said(block, layers)
            refuse_whole(str(config_class.optimizer_name or type(optimizer).__name__), tensor)
            facts = {
                **facts_of(model, config_class.axonn_raw, optimizer, keywords),
                "experts that the script has split": str(split),
            }
        except ValueError as error:
            problem = f"axonn.ted: {error}"
        agree(problem, facts)
        topology, own = _lie(block, split, exchange_weights(layers, expert), tensor, expert)
        known = {"tensor": bwc_tensor_model_parallel_group(mpu), "data": mpu.get_data_parallel_group()}
        self._groups = Groups(topology, known)
        self._tables = Tables(f"ep_size_{expert}", _of_experts(self._groups), topology.expert_tensor)
        self._tables.enter()
        for name, layer in layers.items():
            adopt(layer, self._groups, block, own)
            layer.number = self._groups.enrol(name)
            for parameter in layer.local.parameters():  # type: ignore[union-attr]
                if topology.expert_tensor_parallel and not own:
                    # DeepSpeed's norm counts what is not marked on the first tensor rank only.
                    parameter.tensor_model_parallel = bool(layout_of(parameter).split)
        if dist.get_rank() == 0:
            how = ", experts split over the tensor ranks by the script" if own else ""
            print(f"axonn: TED on the mpu's groups{how}\n{topology}", file=sys.stderr, flush=True)
        self._stashes = Stashes(block.stash) if block.communication_aware_checkpointing else None
        super().__init__(args, model, optimizer, *rest, config_class=config_class, **keywords)
        # DeepSpeed hands out its table itself, into which gradients' hooks look.
        engine: Any = self
        engine.expert_data_parallel_group = dict(engine.expert_data_parallel_group)
        if getattr(self.optimizer, "expert_dp_process_group", None) is not None:
            self.optimizer.expert_dp_process_group = dict(self.optimizer.expert_dp_process_group)

    def _write(self, *rest: Any, **keywords: Any) -> None:
        with self._own_groups(), as_shards():
            super()._write(*rest, **keywords)

    def _read(self, *rest: Any, **keywords: Any) -> tuple:
        with self._own_groups(), as_shards():
            return super()._read(*rest, **keywords)

    @contextmanager
    def _own_groups(self) -> Iterator[None]:
        """DeepSpeed looks its groups up anew each time; another engine of the process may have put its own there."""
        before, tables.mpu = tables.mpu, self.mpu
        try:
            with self._tables.held():
                yield
        finally:
            tables.mpu = before

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's forward; checkpointed blocks keep what they communicate."""
        if self._stashes is None or not torch.is_grad_enabled():
            return super().forward(*inputs, **keywords)
        with self._stashes.recording():
            return super().forward(*inputs, **keywords)

    def buffered_allreduce_fallback(self, *inputs: Any, **keywords: Any) -> Any:
        """DeepSpeed's, over this engine's groups."""
        with self._own_groups():
            return super().buffered_allreduce_fallback(*inputs, **keywords)

    def _take_model_step(self, *inputs: Any, **keywords: Any) -> Any:
        with self._own_groups():
            return super()._take_model_step(*inputs, **keywords)

    def destroy(self) -> None:
        """DeepSpeed's clean-up, and ours."""
        super().destroy()
        self._tables.leave()


def refuse_whole(optimizer: str, tensor: int) -> None:
    """Refuse an optimizer of whole matrices where ranks have parts of them that DeepSpeed's own would take for whole.

    Args:
        optimizer: its name.
        tensor: ranks of the mpu that split layers.

    Raises:
        ValueError: it is one.
    """
    if tensor > 1 and needs_whole_matrices(optimizer):
        raise ValueError(
            f"optimizer.type = {optimizer} looks at whole matrices, and the mpu's {tensor} tensor ranks have parts of them; leave the mpu out and write "
            "tensor, or use an element-wise one such as AdamW"
        )


def _tensor_ranks(mpu: Any) -> int:
    """Number of tensor ranks that the unit has.

    Raises:
        ValueError: its groups are not TED's.
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
    topology = Topology(world, len(tensor))
    for name, ranks, wanted in (
        ("tensor", tensor, topology.tensor_group(rank)),
        ("data", data, topology.data_group(rank)),
    ):
        if ranks != wanted:
            raise ValueError(
                f"rank {rank}'s {name} group in the mpu is {ranks}, and TED's is {wanted}, for tensor ranks are neighbours; "
                "order the ranks of the mpu so, as Megatron does"
            )
    return len(tensor)


def _said(block: Ted, layers: Mapping[str, StockMoE]) -> bool:
    """True if the layers say that their experts are split over the tensor ranks.

    Raises:
        ValueError: layers differ, or the block says otherwise.
    """
    said = {bool(layer.enable_expert_tensor_parallelism): name for name, layer in layers.items()}
    if block.expert_tensor_parallel is False and True in said:
        raise ValueError(
            f"expert_tensor_parallel = false, but layer {said[True]} has enable_expert_tensor_parallelism = true, so that its experts "
            "are split; leave one of the two out"
        )
    if block.expert_tensor_parallel is None and len(said) > 1:
        raise ValueError(
            f"layer {said[True]} has enable_expert_tensor_parallelism = true and layer {said[False]} has false; give all MoE layers the "
            "same, or set axonn.ted.expert_tensor_parallel"
        )
    return True in said


def _lie(block: Ted, said: bool, everyone: list[Weights], tensor: int, expert: int) -> tuple[Topology, bool]:
    """Where the experts are, and whether the script has split them; the same on every rank.

    Raises:
        ConfigError: sizes that do not divide, or experts made for other ranks.
    """

    def of(split: bool) -> Topology:
        return Topology(len(everyone), tensor, expert, split)

    given = block.expert_tensor_parallel
    try:
        split = said if given is None else given
        topology = of(split)
        others = [] if tensor == 1 or len(everyone) % (tensor * expert) else [of(not split)]
    except ValueError as error:
        raise ConfigError(f"axonn.ted: {error}") from None
    if given is None and not split and not kept(everyone, topology):
        # Equal on the ranks that would share them if they were split: then they were made for those.
        made_for = [other for other in others if kept(everyone, other) and same_on_tensor_ranks(everyone, other)]
        topology = made_for[0] if made_for else topology
    own = topology.expert_tensor > 1 and (
        (given is None and said)
        or any(weights.marked for weights in everyone)
        or not same_on_tensor_ranks(everyone, topology)
    )
    refuse_others(everyone, topology, others, own)
    return topology, own


def _of_experts(groups: Groups) -> dict[str, dist.ProcessGroup]:
    """The groups of experts, also those of one rank, which DeepSpeed wants."""
    axes = ("expert", "expert_data")
    alone = None
    if any(groups.size(axis) == 1 for axis in axes):
        every = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        alone = every[dist.get_rank()]
    found = {axis: groups.group(axis) if groups.size(axis) > 1 else alone for axis in axes}
    return {axis: group for axis, group in found.items() if group is not None}
