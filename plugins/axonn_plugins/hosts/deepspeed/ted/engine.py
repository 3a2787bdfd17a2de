"""DeepSpeed's engine for TED: dense layers split over the tensor ranks, experts over tensor and expert ranks (000, chapter 7).

On the mesh of `axonn_tp` tensor is x (and y, beside ``axonn.tensor_parallel``); ranks that differ in z or data read different
tokens. Experts lie on another grid of the same ranks (`on_mesh`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from axonn_plugins import __version__
from axonn_plugins.config import Axonn, ConfigError, Ted, TensorParallel
from axonn_plugins.hosts.common import replicas
from axonn_plugins.hosts.common.experts import described, experts_of
from axonn_plugins.hosts.common.tensor_parallel import layer_plans, options
from axonn_plugins.hosts.deepspeed.agreement import compare
from axonn_plugins.hosts.deepspeed.checkpoint.ted import TedCheckpoints
from axonn_plugins.hosts.deepspeed.engine import AxonnEngine
from axonn_plugins.hosts.deepspeed.goldfish import GoldfishEngine
from axonn_plugins.hosts.deepspeed.optim.tiled_zero import require
from axonn_plugins.hosts.deepspeed.states_config import has_states, take_over
from axonn_plugins.hosts.deepspeed.ted.config import check_experts, check_rest
from axonn_plugins.hosts.deepspeed.ted.layers import stock_layers
from axonn_plugins.hosts.deepspeed.ted.on_mesh import (
    MeshSplit,
    apply_split,
    experts_groups,
    find_split,
    without_experts,
)
from axonn_plugins.hosts.deepspeed.ted.recompute import Stashes
from axonn_plugins.hosts.deepspeed.ted.tables import Tables
from axonn_plugins.hosts.deepspeed.ted.unit import TedUnitEngine
from axonn_plugins.hosts.deepspeed.tensor.config import grid_for
from axonn_tp import Grid, LayerPlan
from axonn_tp.grid.distribute import read_rest
from ted_moe import Groups, Topology


def _others(model: nn.Module, layers: Mapping[str, Any]) -> list[str]:
    """Names of experts that are not in DeepSpeed's layers."""
    try:
        return list(experts_of(model, layers))
    except ValueError as error:
        raise ConfigError(f"axonn.ted: {error}") from None


class TedEngine(TedCheckpoints, AxonnEngine):
    """The engine of `deepspeed.initialize` under ``axonn.ted``; DeepSpeed's own where the block changes nothing."""

    groups: Groups | None
    _tables: Tables | None = None

    def __new__(cls, args: Any = None, model: Any = None, *rest: Any, config_class: Any = None, **keywords: Any) -> Any:  # noqa: D102
        block, layers = config_class.axonn.ted, stock_layers(model)
        others = _others(model, layers)
        if not layers and not others and block.expert != "auto":
            raise ConfigError(
                f"axonn.ted.expert = {block.expert}, and no experts were found in {type(model).__name__}; leave expert out"
            )
        if layers:
            check_experts(config_class.axonn_raw)
        elif not others and dist.get_rank() == 0:
            said = f"ted: no experts were found in {type(model).__name__}, whose layers are all dense"
            print(f"axonn {__version__}: {said}", file=sys.stderr, flush=True)
        if block.tensor > 1 or config_class.axonn.tensor_parallel is not None or config_class.axonn_owner is not None:
            return super().__new__(cls)
        if others and keywords.get("mpu") is not None:
            raise ConfigError(
                f"axonn.ted takes an mpu of the script's own with DeepSpeed's MoE layers, and {others[0]} is another's; leave the mpu out, and "
                "write tensor"
            )
        if (layers or others) and keywords.get("mpu") is None:
            check_rest(config_class.axonn_raw, Grid(gdata=dist.get_world_size()))
            if has_states(config_class.axonn_raw):
                take_over(config_class, "ted")
            return super().__new__(cls)
        for module in model.modules():  # an engine that splits nothing of what is still in files
            read_rest(module, torch.device("cpu"))
        require(config_class.axonn, config_class.axonn_raw)
        if layers:
            deepspeed.DeepSpeedEngine = TedUnitEngine
            return TedUnitEngine(args, model, *rest, config_class=config_class, **keywords)
        compare(model, config_class, rest[0] if rest else keywords.get("optimizer"), keywords)
        stock = DeepSpeedEngine if config_class.axonn.goldfish is None else GoldfishEngine
        deepspeed.DeepSpeedEngine = stock
        return stock(args, model, *rest, config_class=config_class, **keywords)

    def _settings(self, block: Axonn) -> TensorParallel:
        assert block.ted is not None
        self._ted: Ted = block.ted
        self._splits, self._both = True, block.tensor_parallel is not None
        self._stashes = Stashes(block.ted.stash) if block.ted.communication_aware_checkpointing else None
        if block.tensor_parallel is not None:
            return block.tensor_parallel
        return TensorParallel.model_validate({"gx": block.ted.tensor, "plan": "auto", "layout": "replicated"})

    def _find_split(self, model: nn.Module) -> Any:
        grid = grid_for(self._axonn, dist.get_world_size())
        plan: Any = "auto" if self._axonn.plan == "auto" else layer_plans(self._axonn)
        if grid.gx * grid.gy * grid.gz == 1:
            plan = {"*": LayerPlan("replicated")}
        try:
            return find_split(model, grid, self._ted, plan, options(self._axonn))
        except ValueError as error:
            raise ValueError(f"axonn.ted{' beside axonn.tensor_parallel' if self._both else ''}: {error}") from None

    def _apply_split(self, model: nn.Module, split: MeshSplit) -> None:  # type: ignore[override]
        self.mesh = self._make_mesh(grid_for(self._axonn, dist.get_world_size()))
        if self._stashes is not None:
            self._stashes.leave_weights(self.mesh)
        replicas.align_random_state(self.mesh)
        self.groups = apply_split(model, self.mesh, self._ted, split, options(self._axonn))
        if self.groups is not None:
            topology = self.groups.topology
            of_experts = experts_groups(self.mesh, topology)
            self._tables = Tables(f"ep_size_{topology.expert}", of_experts, topology.expert_tensor)
            self._tables.enter()

    def _described(self, split: Any) -> str:
        topology = split.topology or Topology(self.mesh.grid.world, self._ted.tensor)
        experts = described(split.experts, split.cuts, topology.expert_tensor)
        of_experts = f"TED\n{topology}\n{experts}".rstrip()
        if not self._both:
            return of_experts
        return super()._described(split) + (f"\n{of_experts}" if split.topology else "")

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
        try:
            with without_experts(self.module):
                super()._verify_plan(inputs, keywords)
        except ConfigError as error:
            if self._both:
                raise
            found = str(error).removeprefix("axonn.tensor_parallel.plan: ").partition("; ")[0]
            raise ConfigError(
                f"axonn.ted.tensor = {self._ted.tensor}: {found}; code before it looks across features that are split: leave tensor out, or "
                "give deepspeed.initialize an mpu and a model that is split already"
            ) from None
