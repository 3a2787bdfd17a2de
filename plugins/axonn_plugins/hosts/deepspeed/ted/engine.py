"""DeepSpeed's engine for TED: dense layers split over the tensor ranks, experts over tensor and expert ranks (000, chapter 7).

On the grid of `axonn_tp` tensor is x, expert is z, expert data is data; ranks that differ in z or data read different
tokens. Dense layers know x alone. An expert takes the path DeepSpeed keeps for experts.
"""

from __future__ import annotations

import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE as StockMoE
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from axonn_plugins.config import Axonn, ConfigError, Ted, TensorParallel
from axonn_plugins.hosts.common.tensor_parallel import layer_plans, options
from axonn_plugins.hosts.deepspeed import replicas
from axonn_plugins.hosts.deepspeed.agreement import compare
from axonn_plugins.hosts.deepspeed.checkpoint.ted import TedCheckpoints
from axonn_plugins.hosts.deepspeed.engine import AxonnEngine, Split
from axonn_plugins.hosts.deepspeed.states_config import owner
from axonn_plugins.hosts.deepspeed.ted.config import check_experts, check_rest
from axonn_plugins.hosts.deepspeed.ted.experts import exchange_weights, refuse_others, refuse_split
from axonn_plugins.hosts.deepspeed.ted.layers import (
    adopt,
    expert_ranks,
    forget_z,
    grid_of,
    passing_by,
    stand_ins,
    stock_layers,
)
from axonn_plugins.hosts.deepspeed.ted.on_mesh import MeshSplit, apply_split, experts_groups, find_split
from axonn_plugins.hosts.deepspeed.ted.recompute import Stashes
from axonn_plugins.hosts.deepspeed.ted.tables import Tables
from axonn_plugins.hosts.deepspeed.ted.unit import TedUnitEngine
from axonn_plugins.hosts.deepspeed.tensor.config import grid_for
from axonn_tp import Grid, LayerPlan, parallelize
from ted_moe import Groups, Topology


class TedEngine(TedCheckpoints, AxonnEngine):
    """What `deepspeed.initialize` returns under ``axonn.ted``; DeepSpeed's own engine where the block changes no layer."""

    def __new__(cls, args: Any = None, model: Any = None, *rest: Any, config_class: Any = None, **keywords: Any) -> Any:  # noqa: D102
        block, layers = config_class.axonn.ted, stock_layers(model)
        if layers:
            check_experts(config_class.axonn_raw)
        composed = config_class.axonn.tensor_parallel is not None or owner(config_class.axonn, config_class.axonn_stage)
        if block.tensor > 1 or composed:
            return super().__new__(cls)
        if layers:
            if keywords.get("mpu") is not None:
                deepspeed.DeepSpeedEngine = TedUnitEngine
                return TedUnitEngine(args, model, *rest, config_class=config_class, **keywords)
            check_rest(config_class.axonn_raw, Grid(gdata=dist.get_world_size()))
            return super().__new__(cls)
        compare(model, config_class, rest[0] if rest else keywords.get("optimizer"), keywords)
        deepspeed.DeepSpeedEngine = DeepSpeedEngine
        return DeepSpeedEngine(args, model, *rest, config_class=config_class, **keywords)

    _tables: Tables | None = None

    def _settings(self, block: Axonn) -> TensorParallel:
        assert block.ted is not None
        self._ted: Ted = block.ted
        self._splits, self._both = True, block.tensor_parallel is not None
        self._stashes = Stashes(block.ted.stash) if block.ted.communication_aware_checkpointing else None
        if block.tensor_parallel is not None:
            return block.tensor_parallel
        return TensorParallel.model_validate({"gx": block.ted.tensor, "plan": "auto", "layout": "replicated"})

    def _find_split(self, model: nn.Module) -> Any:
        layers, block = stock_layers(model), self._ted
        if self._both:
            return self._find_on_mesh(model)
        try:
            self._topology = Topology(
                dist.get_world_size(), block.tensor, expert_ranks(layers), block.expert_tensor_parallel is not False
            )
            refuse_split(layers, block.tensor)
            grid_of(self._topology)
            if block.tensor == 1 or isinstance(model, StockMoE):
                return Split({"*": LayerPlan("replicated")})
            with stand_ins(model):
                split = self._dense_split(model)
        except ValueError as error:
            raise ValueError(f"axonn.ted: {error}") from None
        whole = {f"{name}.*": LayerPlan("replicated") for name in layers}
        return Split({**whole, **split.plan}, split.placements, split.report)

    def _find_on_mesh(self, model: nn.Module) -> MeshSplit:
        grid = grid_for(self._axonn, dist.get_world_size())
        plan: Any = "auto" if self._axonn.plan == "auto" else layer_plans(self._axonn)
        try:
            return find_split(model, grid, self._ted, plan, options(self._axonn))
        except ValueError as error:
            raise ValueError(f"axonn.ted beside axonn.tensor_parallel: {error}") from None

    def _apply_on_mesh(self, model: nn.Module, split: MeshSplit) -> None:
        self.mesh = self._make_mesh(grid_for(self._axonn, dist.get_world_size()))
        replicas.align_random_state(self.mesh)
        groups = apply_split(model, self.mesh, self._ted, split, options(self._axonn))
        if groups is not None:
            self.groups, self._topology = groups, groups.topology
            of_experts = experts_groups(self.mesh, groups.topology)
            self._tables = Tables(f"ep_size_{groups.topology.expert}", of_experts, groups.topology.expert_tensor)
            self._tables.enter()

    def _apply_split(self, model: nn.Module, split: Any) -> None:
        if self._both:
            self._apply_on_mesh(model, split)
            return
        topology, layers = self._topology, stock_layers(model)
        if layers:
            stock = [Topology(topology.world, 1, topology.expert)] if topology.tensor > 1 else []
            refuse_others(exchange_weights(layers, topology.expert), topology, stock, own=False)
        self.mesh = self._make_mesh(grid_of(topology))
        replicas.align_random_state(self.mesh)
        axes = {"tensor": "x", "data": "batch", "expert_data": "data"}
        if topology.expert_tensor_parallel:
            axes["expert"] = "z"
        self.groups = Groups(topology, {axis: self.mesh.group(ours) for axis, ours in axes.items()})
        self._tables = (
            Tables(f"ep_size_{topology.expert}", self._of_experts(), topology.expert_tensor) if layers else None
        )
        if self._tables is not None:
            self._tables.enter()
        for layer in layers.values():
            adopt(layer, self.groups, self._ted)
            layer.shared_out = topology.tensor > 1 or topology.expert > 1  # type: ignore[assignment]
        dense = self._make_mesh(Grid.for_world(topology.world, gx=topology.tensor))
        parallelize(model, dense, split.plan, options(self._axonn))
        forget_z(model)

    def _of_experts(self) -> dict[str, dist.ProcessGroup]:
        """The groups of experts, also those of one rank."""
        expert = self.groups.group("expert") if self.groups.size("expert") > 1 else self.mesh.group("z")
        return {"expert": expert, "expert_data": self.mesh.group("data")}

    def _described(self, split: Any) -> str:
        if self._both:
            experts = f"\nTED\n{self._topology}" if split.topology is not None else ""
            return super()._described(split) + experts
        return f"TED\n{self._topology}"

    def _configure_distributed_model(self, model: nn.Module) -> None:
        super()._configure_distributed_model(model)
        self.has_moe_layers = self._apart

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's forward; checkpointed blocks keep what they communicate."""
        if self._stashes is None or not torch.is_grad_enabled():
            return super().forward(*inputs, **keywords)
        with self._stashes.recording():
            outputs = super().forward(*inputs, **keywords)
        if self.micro_steps == 0 and self._stashes.nbytes and dist.get_rank() == 0:
            place = "device's" if self._ted.stash == "device" else "host's"
            print(
                f"axonn: communication-aware checkpointing keeps {self._stashes.nbytes / 2**10:,.0f} KiB a forward in the {place} memory",
                file=sys.stderr,
                flush=True,
            )
        return outputs

    def destroy(self) -> None:
        """DeepSpeed's clean-up, and ours."""
        super().destroy()
        if self._tables is not None:
            self._tables.leave()

    @property
    def stashed_bytes(self) -> int:
        """Bytes that checkpointed blocks keep now of what they communicated."""
        return 0 if self._stashes is None else self._stashes.nbytes

    def _verify_plan(self, inputs: tuple, keywords: dict[str, Any]) -> None:
        # Routing is not continuous: rounding in a dense layer may send a token elsewhere.
        try:
            with passing_by(self.module):
                super()._verify_plan(inputs, keywords)
        except ConfigError as error:
            found = str(error).removeprefix("axonn.tensor_parallel.plan: ").partition("; ")[0]
            raise ConfigError(
                f"axonn.ted.tensor = {self._ted.tensor}: {found}; code before it looks across features that are split: leave tensor out, or "
                "give deepspeed.initialize an mpu and a model that is split already"
            ) from None
