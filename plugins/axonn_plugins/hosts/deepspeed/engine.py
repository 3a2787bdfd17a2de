"""DeepSpeed's engine on the 4D grid: the model is split before DeepSpeed sees it, and rides on its own machinery.

Ranks that differ in z or data are DeepSpeed's data-parallel ranks; those of one x-y plane its model-parallel ones. Gradients are
summed by parameters' layouts: by the optimizer where states are ours (`states_config.owner`), else here.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.utils import groups
from torch import Tensor, nn

from axonn_plugins import __version__
from axonn_plugins.config import Axonn, ConfigError, TensorParallel
from axonn_plugins.hosts.common import replicas
from axonn_plugins.hosts.common.elementwise import check_by_parameter
from axonn_plugins.hosts.common.split_states import split_states, whole_shapes
from axonn_plugins.hosts.common.tensor_parallel import layer_plans, options
from axonn_plugins.hosts.deepspeed.agreement import (
    agree,
    check_shapes,
    facts_of,
    refuse_experts,
    refuse_quantized,
)
from axonn_plugins.hosts.deepspeed.checkpoint.grid import GridCheckpoints
from axonn_plugins.hosts.deepspeed.clipping import disobey, obey
from axonn_plugins.hosts.deepspeed.data_efficiency import refuse_dropped_tokens, send_to_all
from axonn_plugins.hosts.deepspeed.labels import MaskedLabels, mask_of
from axonn_plugins.hosts.deepspeed.plan_check import check_plan, one_sentence
from axonn_plugins.hosts.deepspeed.replica_watch import ReplicaWatch
from axonn_plugins.hosts.deepspeed.scalars import as_vectors
from axonn_plugins.hosts.deepspeed.states import divisor
from axonn_plugins.hosts.deepspeed.states_config import take_over_whole
from axonn_plugins.hosts.deepspeed.ted.left_out import let_go
from axonn_plugins.hosts.deepspeed.tensor import auto_sizes
from axonn_plugins.hosts.deepspeed.tensor.config import grid_for
from axonn_plugins.hosts.deepspeed.tracing import trace
from axonn_plugins.hosts.deepspeed.unit import GridUnit
from axonn_plugins.hosts.deepspeed.watched_calls import watch_calls
from axonn_plugins.hosts.deepspeed.whole_parameters import mark
from axonn_tp import (
    Grid,
    LayerPlan,
    Mesh,
    Placement,
    auto_plan,
    clip_grad_norm_,
    grad_norm,
    parallelize,
    place,
    sync_gradients,
)
from axonn_tp.comm.gradients import keep_sums
from axonn_tp.compiled.refusals import check_compiled
from axonn_tp.grid.leaves import tensors_in
from axonn_tp.layers.activation import Activation
from axonn_tp.layers.loss_watch import LossWatch, OfExperts

# DeepSpeed's partition_activations leaves these alone: the ranks of its model-parallel group hold other shares, not the same activation.
Activation.no_checkpointing = property(lambda _: checkpointing.PARTITION_ACTIVATIONS)  # type: ignore[attr-defined]
_gather = checkpointing.gather_partitioned_activations
engines: WeakSet[Any] = WeakSet()
"""Engines of ours; without one DeepSpeed's checkpoints are as they were."""
_found: WeakKeyDictionary[nn.Module, dict[str, LayerPlan]] = WeakKeyDictionary()
"""The plans by which models were split, as another engine of one of them wants it."""


def _gathered(tensors: Sequence[Tensor], device: Any = None) -> tuple[Tensor, ...]:
    """DeepSpeed's; the views that it makes want gradients where their base does, and that of a view, which layers of ours may give, does not."""
    if not engines:
        return _gather(tensors, device)
    pairs = zip(_gather(tensors, device), tensors[::2], strict=True)
    return tuple(made.detach().requires_grad_(given.requires_grad) for made, given in pairs)


checkpointing.gather_partitioned_activations = _gathered


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
    """The split of a model: the kind and the placement of each layer that changes.

    Attributes:
        plan: by layer.
        placements: of all modules that change.
        report: what an automatic plan says; None where another engine of the model has said it.
    """

    plan: dict[str, LayerPlan]
    placements: list[Placement] = field(default_factory=list)
    report: Any = None


class AxonnEngine(GridCheckpoints, MaskedLabels):
    """`DeepSpeedEngine` for a model in 3D PMM; what `deepspeed.initialize` returns under the ``"axonn"`` block."""

    _summed = False
    """True if gradients are all ranks' since the last step, by no optimizer of ours."""

    def __init__(
        self, args: Any, model: nn.Module, optimizer: Any = None, *rest: Any, config_class: Any = None, **keywords: Any
    ) -> None:
        # DeepSpeed sets the device later, but our first collectives need it.
        get_accelerator().set_device(getattr(args, "device_rank", int(os.environ.get("LOCAL_RANK", "0"))))
        block: Axonn = config_class.axonn
        if block.samo is not None:
            from samo.reparametrised import absorb

            absorb(model)
        if block.tensor_parallel is not None and len(block.tensor_parallel.given) < 3:
            keywords["config"] = choose_sizes(model, config_class, optimizer, keywords)
            block = config_class.axonn
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer) and callable(optimizer):
            # A function that sorts parameters by their shapes must see them before they are split.
            given = keywords.pop("model_parameters", None)
            keywords["model_parameters"] = list(model.parameters() if given is None else given)
            with whole_shapes(model):
                optimizer = optimizer(keywords["model_parameters"])
        self._axonn = self._settings(block)
        if self._splits:
            refuse_dropped_tokens(config_class, grid_for(self._axonn, dist.get_world_size()), self._axonn.layout)
        problem, split = None, Split({})
        try:
            self._own_states(config_class, optimizer)
            check_by_parameter(optimizer, block.samo is not None)
            check_shapes(model)
            mask_of(block, model)
            split = self._find_split(model)
        except ValueError as error:
            problem = str(error)
        facts = {} if problem else facts_of(model, config_class.axonn_raw, optimizer, keywords)
        agree(problem, facts | {f"the plan of {name}": repr(layer) for name, layer in split.plan.items()})
        if take_over_whole(config_class, optimizer):
            self._own_states(config_class, optimizer)
        self._verify = self._axonn.verify_plan and bool(split.plan)
        self._apply_split(model, split)
        if block.ted is not None:
            let_go(optimizer, keywords)
        if isinstance(optimizer, torch.optim.Optimizer):
            split_states(optimizer, self.mesh)
        replicas.share_samplers(self.mesh)
        self._replicas = ReplicaWatch(self.mesh, model, self._axonn.check_every, self._axonn.broadcast_inputs)
        self._unwatch = watch_calls(model, self._replicas) if self.mesh.size("model") > 1 else lambda: None
        if dist.get_rank() == 0:
            print(f"axonn {__version__}: {self._described(split)}", file=sys.stderr, flush=True)
            if split.report is not None:
                print(split.report, file=sys.stderr, flush=True)
        if self._splits:
            keywords["mpu"] = GridUnit(self.mesh)
        super().__init__(args, model, optimizer, *rest, config_class=config_class, **keywords)
        engines.add(self)
        send_to_all(self, self.mesh)
        mark(self.module.parameters(), self.mesh, self.optimizer if self._owns else None)
        obey(self)
        if self._owns and split.report is not None and split.report.at_times:
            # On ranks that called fewer layers, sums that begin as gradients come would begin elsewhere among those over z.
            self.optimizer.reduces_early = False
        self._losses = LossWatch(self.module)
        self.backward: Callable[..., Any] = self._looked_at
        self._tracer = trace(self, self._axonn)

    def _looked_at(self, loss: Tensor, *rest: Any, **keywords: Any) -> Any:
        """DeepSpeed's `backward`.

        Raises:
            ConfigError: the loss is of shards.
        """
        try:
            self._losses.look(*[loss] if isinstance(loss, Tensor) else [])
        except ValueError as error:
            raise ConfigError(
                f"axonn.{'ted' if isinstance(error, OfExperts) else 'tensor_parallel'}: {error}"
            ) from None
        return super().backward(loss, *rest, **keywords)

    def _settings(self, block: Axonn) -> TensorParallel:
        self._splits = block.tensor_parallel is not None
        return block.tensor_parallel or TensorParallel.model_validate({})

    def _find_split(self, model: nn.Module) -> Split:
        """Find the split of the model; communicates nothing and changes nothing.

        Raises:
            ValueError: it cannot be split.
        """
        try:
            refuse_experts(model)
            refuse_quantized(model)
            return self._dense_split(model) if self._splits else Split({})
        except ValueError as error:
            key = "axonn.tensor_parallel.plan" if self._splits else self._own_key
            raise ValueError(f"{key}: {str(error).removeprefix('plan: ')}") from None

    def _dense_split(self, model: nn.Module) -> Split:
        grid, plan, report = grid_for(self._axonn, dist.get_world_size()), layer_plans(self._axonn), None
        if self._axonn.plan == "auto":
            names, known = dict(model.named_modules()).keys(), _found.get(model)
            plan, report = (known, None) if known and known.keys() <= names else auto_plan(model, grid)
        chosen = options(self._axonn)
        placements = place(model, grid, plan, chosen)
        if chosen.compile:
            check_compiled(model, placements, grid)
        return Split(plan, placements, report)

    def _apply_split(self, model: nn.Module, split: Split) -> None:
        """Make the mesh, and the model parallel."""
        self.mesh = self._make_mesh(grid_for(self._axonn, dist.get_world_size()))
        if self._splits:
            replicas.align_random_state(self.mesh)
            parallelize(model, self.mesh, split.plan, options(self._axonn))
            _found[model] = split.plan

    def _make_mesh(self, grid: Grid) -> Mesh:
        return Mesh(grid, get_accelerator().device_name().split(":")[0])

    def _described(self, split: Split) -> str:
        if not self._splits:
            return f"data parallel on {self.mesh.grid.world} ranks"
        grid, counted = self.mesh.grid, Counter(placement.kind for placement in split.placements)
        kinds = ", ".join(f"{counted[kind]} {kind}" for kind in sorted(counted))
        none = "split already" if {layer.kind for layer in split.plan.values()} - {"replicated"} else "none to split"
        sizes = f"gx={grid.gx} gy={grid.gy} gz={grid.gz} gdata={grid.gdata}"
        return f"3D PMM on {grid.world} ranks, {sizes}; layers: {kinds or none}"

    def _broadcast_model(self) -> None:
        """Nothing to do where `parallelize` split rank 0's weights."""
        if not self._splits:
            with as_vectors(self.module):
                super()._broadcast_model()

    def buffered_allreduce_fallback(self, grads: Any = None, elements_per_buffer: int = 500_000_000) -> None:
        """Sum gradients by their layouts, where the optimizer does not."""
        if self._summed:
            raise ConfigError(
                f"engine.backward was called a second time before engine.step(), and the outputs of {type(self.module).__name__} are no tensor, tuple, "
                "list, dictionary or dataclass, in which the second pass would have been seen; return one of these, or add the losses up"
            )
        sync_gradients(self.module.parameters(), self.mesh, divisor=divisor(self.gradient_average, self.mesh.grid))
        self._summed = True

    def _pass_begins(self, gradient: Tensor) -> None:
        """A second backward pass before a step leaves what is summed already as it is."""
        if self._summed:
            keep_sums(self.module.parameters(), self.mesh, divisor(self.gradient_average, self.mesh.grid))
            self._summed = False

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's forward, which compares its arguments between replicas; now and then the outputs are as well."""
        if self._verify and self.mesh.size("model") > 1 and self.module.training and torch.is_grad_enabled():
            self._verify = False
            self._verify_plan(inputs, keywords)
        with one_sentence():
            outputs = super().forward(*inputs, **keywords)
        if self.module.training and torch.is_grad_enabled():
            self._replicas.watch(outputs)
        for output in [] if self._owns else tensors_in(outputs):
            if output.requires_grad:
                output.register_hook(self._pass_begins)
        return outputs

    def _verify_plan(self, inputs: tuple, keywords: dict[str, Any]) -> None:
        half = self.fp16_enabled() or self.bfloat16_enabled() or getattr(self._config, "torch_autocast_enabled", False)
        half = half or torch.is_autocast_enabled(self.mesh.device.type)
        # The module itself: DeepSpeed's forward counts passes and hooks the outputs.
        check_plan(self.module, lambda: self.module(*inputs, **keywords), self.mesh, half=half)

    def clip_fp32_gradients(self) -> None:
        """Clip by the whole model's norm, where the optimizer does not."""
        if not self._owns:
            norm = clip_grad_norm_(self.module.parameters(), self.mesh, self.gradient_clipping())
            self._global_grad_norm = norm.item()

    def _take_model_step(self, lr_kwargs: Any) -> None:
        if not self._owns and not self.gradient_clipping() > 0:
            self._global_grad_norm = grad_norm(self.module.parameters(), self.mesh).item()
        super()._take_model_step(lr_kwargs)
        self._summed = False
        self._replicas.stepped(self.global_steps)

    def destroy(self) -> None:
        """DeepSpeed's clean-up, and ours."""
        if self._tracer is not None:
            self._tracer.close()
        super().destroy()
        engines.discard(self)
        disobey(self)
        self._unwatch()
        replicas.stop_sharing_samplers(self.mesh)
        groups.mpu = None if groups.mpu is self.mpu else groups.mpu
