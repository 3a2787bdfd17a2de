"""DeepSpeed's engine on the 4D grid: the model is split before DeepSpeed sees it, and rides on its own machinery.

Ranks that differ in z or data are DeepSpeed's data-parallel ranks; those of one x-y plane its model-parallel ones.
A weight split over z takes the path DeepSpeed keeps for experts: reduced over data only, divided by gz·gdata.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups
from torch import nn

from axonn_plugins import __version__
from axonn_plugins.config import Axonn, ConfigError, TensorParallel
from axonn_plugins.hosts.common.tensor_parallel import layer_plans, options
from axonn_plugins.hosts.deepspeed import replicas
from axonn_plugins.hosts.deepspeed.agreement import agree, check_optimizer, check_shapes, facts_of, refuse_experts
from axonn_plugins.hosts.deepspeed.optim.by_layout import LayoutZeroOptimizer, MixedPrecisionOptimizer
from axonn_plugins.hosts.deepspeed.optim.double_zero import DoubleZero
from axonn_plugins.hosts.deepspeed.optim.param_groups import extend_scheduler, schedulers_of, split_groups
from axonn_plugins.hosts.deepspeed.optim.wrapped import loss_scaler
from axonn_plugins.hosts.deepspeed.replica_watch import ReplicaWatch, watch_calls
from axonn_plugins.hosts.deepspeed.tensor import auto_sizes
from axonn_plugins.hosts.deepspeed.tensor.config import grid_for
from axonn_plugins.hosts.deepspeed.tracing import TracedEngine
from axonn_plugins.hosts.deepspeed.unit import GridUnit
from axonn_tp import (
    Grid,
    LayerPlan,
    Mesh,
    Placement,
    auto_plan,
    clip_grad_norm_,
    first_difference,
    grad_norm,
    layout_of,
    parallelize,
    place,
    sync_gradients,
)

_EXPERT_TABLES = (
    (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_PARALLEL_GROUP_RANKS),
    (groups._EXPERT_DATA_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP_RANKS),
)
_named: Counter[str] = Counter()
"""Engines that use a name in these tables."""


def choose_sizes(
    model: nn.Module,
    config_class: Any,
    optimizer: Any,
    keywords: dict[str, Any],
    planned: nn.Module | None = None,
    stage: int = 0,
    stages: int = 1,
    unit: Any = None,
) -> dict[str, Any]:
    """Rank 0 chooses the sizes that are "auto", and every rank parses the configuration again with them.

    Args:
        model: the serial model, or this rank's stage of it.
        config_class: DeepSpeed's parsed configuration.
        optimizer: the script's.
        keywords: other arguments of `deepspeed.initialize`.
        planned: what the planner looks at, where that is not the model.
        stage: of a pipeline.
        stages: how many there are.
        unit: the pipeline's.

    Returns:
        The configuration with sizes.

    Raises:
        ConfigError: none fit; the same on every rank.
    """
    block = config_class.axonn
    problem, chosen, settings, raw = None, None, block.tensor_parallel, config_class.axonn_raw
    assert settings is not None
    try:
        check_shapes(model)
        if dist.get_rank() == 0:
            plans, ranks = layer_plans(settings), dist.get_world_size() // stages
            chosen = auto_sizes.choose_sizes(
                planned or model, settings, raw, ranks, plans, options(settings), block.ted
            )
    except ValueError as error:
        problem = str(error)
    facts = facts_of(model, raw, optimizer, keywords) if problem is None else {}
    chosen = agree(problem, facts, chosen, stage)
    if dist.get_rank() == 0:
        print(f"axonn: {chosen.why}", file=sys.stderr, flush=True)
    raw = auto_sizes.with_sizes(raw, chosen.sizes)
    config_class.__init__(raw, unit)
    return raw


@dataclass
class Split:
    """What becomes of a model.

    Attributes:
        plan: by layer.
        placements: of all modules that change.
        report: what an automatic plan says.
    """

    plan: dict[str, LayerPlan]
    placements: list[Placement] = field(default_factory=list)
    report: Any = None


class AxonnEngine(DoubleZero, TracedEngine):
    """`DeepSpeedEngine` for a model in 3D PMM; what `deepspeed.initialize` returns under the ``"axonn"`` block."""

    client_lr_scheduler: Any

    def __init__(
        self, args: Any, model: nn.Module, optimizer: Any = None, *rest: Any, config_class: Any = None, **keywords: Any
    ) -> None:
        # DeepSpeed sets the device later, but our first collectives need it.
        get_accelerator().set_device(getattr(args, "device_rank", int(os.environ.get("LOCAL_RANK", "0"))))
        block: Axonn = config_class.axonn
        if block.tensor_parallel is not None and len(block.tensor_parallel.given) < 3:
            keywords["config"] = choose_sizes(model, config_class, optimizer, keywords)
            block = config_class.axonn
        self._own_states(config_class, optimizer)
        self._axonn = self._settings(block)
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer) and callable(optimizer):
            # A function that sorts parameters by their shapes must see them before they are split.
            given = keywords.pop("model_parameters", None)
            keywords["model_parameters"] = list(model.parameters() if given is None else given)
            optimizer = optimizer(keywords["model_parameters"])
        problem, split = None, Split({})
        try:
            check_optimizer(optimizer)
            check_shapes(model)
            split = self._find_split(model)
        except ValueError as error:
            problem = str(error)
        facts = {} if problem else facts_of(model, config_class.axonn_raw, optimizer, keywords)
        agree(problem, facts | {f"the plan of {name}": repr(layer) for name, layer in split.plan.items()})
        self._verify = self._axonn.verify_plan and bool(split.plan)
        self._apply_split(model, split)
        self._trace(self._axonn, self.mesh)
        replicas.share_samplers(self.mesh)
        self._replicas = ReplicaWatch(self.mesh, model, self._axonn.check_every, self._axonn.broadcast_inputs)
        self._unwatch = watch_calls(model, self._replicas) if self.mesh.size("model") > 1 else lambda: None
        self._names: set[str] = set()
        # DeepSpeed's groups are those of one grid, and experts beside split weights are on another.
        self._by_layout = block.tensor_parallel is not None and block.ted is not None
        self._apart = not self._owns and not self._by_layout and self._mark_apart(model)
        self._wide = any(p.dtype == torch.float64 for p in model.parameters())
        if dist.get_rank() == 0:
            print(f"axonn {__version__}: {self._described(split)}", file=sys.stderr, flush=True)
            if split.report is not None:
                print(split.report, file=sys.stderr, flush=True)
        if self._splits:
            keywords["mpu"] = GridUnit(self.mesh)
        super().__init__(args, model, optimizer, *rest, config_class=config_class, **keywords)

    def _settings(self, block: Axonn) -> TensorParallel:
        self._splits = block.tensor_parallel is not None
        return block.tensor_parallel or TensorParallel.model_validate({})

    def _find_split(self, model: nn.Module) -> Split:
        """What becomes of the model; communicates nothing and changes nothing.

        Raises:
            ValueError: it cannot be split.
        """
        try:
            refuse_experts(model)
            return self._dense_split(model) if self._splits else Split({})
        except ValueError as error:
            raise ValueError(f"axonn.tensor_parallel.plan: {str(error).removeprefix('plan: ')}") from None

    def _dense_split(self, model: nn.Module) -> Split:
        grid, plan, report = grid_for(self._axonn, dist.get_world_size()), layer_plans(self._axonn), None
        if self._axonn.plan == "auto":
            plan, report = auto_plan(model, grid)
        return Split(plan, place(model, grid, plan, options(self._axonn)), report)

    def _apply_split(self, model: nn.Module, split: Split) -> None:
        """Make the mesh, and the model parallel."""
        self.mesh = self._make_mesh(grid_for(self._axonn, dist.get_world_size()))
        if self._splits:
            replicas.align_random_state(self.mesh)
            parallelize(model, self.mesh, split.plan, options(self._axonn))

    def _make_mesh(self, grid: Grid) -> Mesh:
        return Mesh(grid, get_accelerator().device_name().split(":")[0])

    def _described(self, split: Split) -> str:
        if not self._splits:
            return f"data parallel on {self.mesh.grid.world} ranks"
        grid, counted = self.mesh.grid, Counter(placement.kind for placement in split.placements)
        kinds = ", ".join(f"{counted[kind]} {kind}" for kind in sorted(counted))
        sizes = f"gx={grid.gx} gy={grid.gy} gz={grid.gz} gdata={grid.gdata}"
        return f"3D PMM on {grid.world} ranks, {sizes}; layers: {kinds or 'none to split'}"

    def _mark_apart(self, model: nn.Module) -> bool:
        """Put parameters whose gradients are not summed over z and data on DeepSpeed's expert path; whether there are any.

        It sums over the group given here, and divides by gz·gdata.
        """
        grid, found = self.mesh.grid, False
        # DeepSpeed reads the third word as a size.
        names = {
            "data": f"ep_size_{grid.gz}_axonn_{grid.gx}x{grid.gy}x{grid.gdata}",
            "tokens": f"ep_size_{grid.gy}_axonn_tokens_{grid.gx}x{grid.gz}x{grid.gdata}",
        }
        for parameter in model.parameters():
            axis = layout_of(parameter).sum_axis
            if self.mesh.group(axis) is self.mesh.group("batch"):
                parameter.allreduce = True  # type: ignore[attr-defined]
                continue
            name = names[axis]
            beside = "z" if axis == "data" else "y"
            for (table, ranks), group in zip(_EXPERT_TABLES, (beside, axis), strict=True):
                table[name] = self.mesh.group(group)
                ranks[name] = dist.get_process_group_ranks(self.mesh.group(group))
            parameter.allreduce, parameter.group_name = False, name  # type: ignore[attr-defined]
            self._names.add(name)
            found |= parameter.requires_grad
        _named.update(self._names)
        return found

    def _configure_distributed_model(self, model: nn.Module) -> None:
        super()._configure_distributed_model(model)
        self.has_moe_layers = self.has_moe_layers or self._apart
        if not self._splits:
            return
        # One checkpoint file for each (x, y, z); the replicas along data need none.
        at, grid = self.mesh.coordinates, self.mesh.grid
        self.checkpoint_mp_rank = at["x"] + grid.gx * (at["y"] + grid.gy * at["z"])
        self.mp_world_size = grid.gx * grid.gy * grid.gz

    def _broadcast_model(self) -> None:
        """Nothing to do where `parallelize` split rank 0's weights."""
        if not self._splits:
            super()._broadcast_model()

    def buffered_allreduce_fallback(self, grads: Any = None, elements_per_buffer: int = 500_000_000) -> None:
        """DeepSpeed's gradient sum at stage 0; what it does not know, as float64, we sum by layouts."""
        if not self._owns and (self._wide or self._by_layout) and grads is None:
            sync_gradients(self.module.parameters(), self.mesh, average=self.gradient_average)
        else:
            super().buffered_allreduce_fallback(grads, elements_per_buffer)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        if isinstance(client_optimizer, torch.optim.Optimizer) and callable(self.client_lr_scheduler):
            self.client_lr_scheduler = self.client_lr_scheduler(client_optimizer)
        if self._apart:
            if client_optimizer is None:
                model_parameters = split_groups(model_parameters)
            else:
                before = len(client_optimizer.param_groups)
                client_optimizer.param_groups[:] = split_groups(client_optimizer.param_groups)
                for scheduler in schedulers_of(client_optimizer):
                    extend_scheduler(scheduler, client_optimizer.param_groups, before)
        super()._configure_optimizer(client_optimizer, model_parameters)

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        return LayoutZeroOptimizer.adopt(super()._configure_zero_optimizer(optimizer), self.mesh)

    def _configure_fp16_optimizer(self, optimizer: Any, low_precision_dtype: torch.dtype) -> MixedPrecisionOptimizer:
        scaler = loss_scaler(self, low_precision_dtype)
        return MixedPrecisionOptimizer(optimizer, self.mesh, scaler, self.gradient_clipping())

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's forward, which compares its arguments between replicas; now and then the outputs are as well."""
        if self._verify and self.mesh.size("model") > 1 and self.module.training and torch.is_grad_enabled():
            self._verify = False
            self._verify_plan(inputs, keywords)
        outputs = super().forward(*inputs, **keywords)
        if self.module.training and torch.is_grad_enabled():
            self._replicas.computed(outputs, "model's outputs")
        return outputs

    def _verify_plan(self, inputs: tuple, keywords: dict[str, Any]) -> None:
        half = self.fp16_enabled() or self.bfloat16_enabled() or self.torch_autocast_enabled()
        half = half or torch.is_autocast_enabled(self.mesh.device.type)
        # The module itself: DeepSpeed's forward counts passes and hooks the outputs.
        found = first_difference(
            self.module, lambda: self.module(*inputs, **keywords), self.mesh, 0.1 if half else 1e-3
        )
        if found is not None:
            raise ConfigError(
                f"axonn.tensor_parallel.plan: the output of layer {found[0]} differs from the serial model's by {found[1]:.1%}; code before it "
                "looks across features that are split, or parts or heads are wrong: correct the plan, or name its layers self_contained"
            )

    def _backward_prologue_per_tensor(self, grad: Any) -> Any:
        """Called with the gradient of each of the model's outputs, however backward was started."""
        if grad is not None:
            self._replicas.computed(grad, "gradients of the model's outputs")
        return super()._backward_prologue_per_tensor(grad)

    def allreduce_gradients(self, *rest: Any, **keywords: Any) -> None:
        """DeepSpeed's, over this engine's groups."""
        with self._own_groups():
            super().allreduce_gradients(*rest, **keywords)

    def clip_fp32_gradients(self) -> None:
        """Clip by the whole model's norm."""
        if not self._owns:
            norm = clip_grad_norm_(self.module.parameters(), self.mesh, self.gradient_clipping())
            self._global_grad_norm = norm.item()

    def _take_model_step(self, lr_kwargs: Any) -> None:
        plain = isinstance(self.optimizer, torch.optim.Optimizer)
        if plain and not self.gradient_clipping():
            self._global_grad_norm = grad_norm(self.module.parameters(), self.mesh).item()
        with self._own_groups():
            super()._take_model_step(lr_kwargs)
        self._replicas.stepped(self.global_steps)

    def destroy(self) -> None:
        """DeepSpeed's clean-up, and ours."""
        super().destroy()
        self._unwatch()
        replicas.stop_sharing_samplers(self.mesh)
        # A stock engine that comes later looks for the largest of the names; another engine of ours may have the same.
        _named.subtract(self._names)
        for name in (name for name in self._names if not _named[name]):
            for tables in _EXPERT_TABLES:
                for table in tables:
                    table.pop(name, None)
        self._names = set()
        if groups.mpu is self.mpu:
            groups.mpu = None
