"""The part of an engine whose gradients and optimizer states are ours: compressed, shared out over ranks, or in host memory.

DeepSpeed then takes itself for stage 0 of ZeRO, and its own sum of gradients does not run: `samo.Optimizer` sums them over
the ranks that each parameter's layout names.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from axonn_plugins.config import Axonn, ConfigError
from axonn_plugins.config.offload_optimizer import OffloadOptimizer
from axonn_plugins.hosts.deepspeed.checkpoint.checked import CheckedCheckpoints
from axonn_plugins.hosts.deepspeed.optim.wrapped import basic_optimizer, check_optimizer, loss_scaler
from axonn_plugins.hosts.deepspeed.sections import on, section
from axonn_tp import Grid, Mesh, layout_of, sum_ranks
from axonn_tp.checkpoint.dealt import DealtNames

if TYPE_CHECKING:
    from axonn_plugins.hosts.common.composition import Composition
    from axonn_plugins.samo.pruning import Pruning

_AXES = ("x", "y", "z", "data")
_ENDS = {"compression_scheduler": "_configure_compression_scheduler", "quantizer": "_configure_quantization"}
"""Attributes that `_configure_optimizer` sets last, and the methods that make them, in versions of DeepSpeed that have these."""


def divisor(mean: bool, grid: Grid) -> int:
    """The number by which sums of gradients are divided.

    Args:
        mean: false where DeepSpeed's gradient_allreduce_op is sum, the gradient of the sum of the readers' losses.
        grid: of the mesh.
    """
    return grid.batch if mean else grid.batch // grid.readers


def _nothing(*_: Any, **__: Any) -> None:
    """Reduces no gradient, and is no optimizer."""


_evaluates = False


@contextmanager
def without_states() -> Iterator[None]:
    """Inside, an engine that is given no optimizer is one that only evaluates, in 16 bits as well."""
    global _evaluates
    before, _evaluates = _evaluates, True
    try:
        yield
    finally:
        _evaluates = before


class EngineHost:
    """An engine as systems know it: `axonn_plugins.hosts.host.Host`.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: OwnStates) -> None:
        self._engine = engine
        self.model: nn.Module = engine.module
        self.mesh = engine.mesh

    @property
    def steps(self) -> int:
        """Optimizer steps that were taken."""
        return self._engine.global_steps

    def serial_names(self) -> dict[nn.Parameter, str]:
        """Names of this rank's parameters in the serial model."""
        names = DealtNames(self.model)
        return {parameter: names.outward(name) for name, parameter in self.model.named_parameters()}

    def stages_with(self, name: str) -> int:
        """Number of stages of a pipeline that hold a parameter of this name."""
        return self._engine._copies(name)

    def counts(self, parameter: Tensor) -> bool:
        """True if this rank counts a parameter in a sum over all ranks."""
        return self._engine._counts(parameter)


class OwnStates(CheckedCheckpoints):
    """The part of an engine that makes the optimizer, and whose states these are."""

    optimizer: Any
    mesh: Mesh
    has_moe_layers: bool
    _own_block: Axonn | None = None
    _own_stage, _own_key = 0, "axonn"
    _stock_experts = False
    """True if experts are DeepSpeed's own."""
    composition: Composition | None = None

    def _own_states(self, config_class: Any, optimizer: Any) -> None:
        """See whether the block asks for states of our own; call first.

        Raises:
            ConfigError: it does, and there is no optimizer.
        """
        if config_class.axonn_owner is None:
            return
        if _evaluates and optimizer is None and not config_class.optimizer_name:
            self._configure_bf16_optimizer = _nothing  # which would keep float32 weights and gradients
            return
        self._own_key = f"axonn.{config_class.axonn_owner}"
        self._own_block, self._own_stage = config_class.axonn, config_class.axonn_stage
        if optimizer is None and not config_class.optimizer_name:
            raise ConfigError(
                f"{self._own_key} is about an optimizer's state, and there is no optimizer; add the section optimizer, or pass one to "
                "deepspeed.initialize"
            )

    @property
    def _owns(self) -> bool:
        return self._own_block is not None

    @property
    def _pruning(self) -> Pruning | None:
        return None if self.composition is None else self.composition.pruning

    # What a pipeline knows better

    def _copies(self, name: str) -> int:
        return 1

    def _counts(self, parameter: Tensor) -> bool:
        layout = layout_of(parameter)
        return layout.counted_here(self.mesh.over(layout.grid).coordinates, _AXES)

    # Optimizer

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        # Experts' gradients are summed, and their files written, by their layouts.
        self.has_moe_layers = self.has_moe_layers and self._stock_experts
        if client_optimizer is None:
            check_optimizer(section(self._config.axonn_raw, "optimizer"), self._owns)
        if self._own_block is None:
            self._config.axonn.require_gather(self.zero_optimization_stage(), ours=False)
            super()._configure_optimizer(client_optimizer, model_parameters)
            return
        # Only here is `samo` needed, a name that a user's folder may have.
        from axonn_plugins.hosts.common.composition import Composition
        from axonn_plugins.hosts.deepspeed.optim.states import StateOptimizer

        basic = basic_optimizer(self, client_optimizer, model_parameters, self._own_key)
        host = EngineHost(self)
        self.composition = Composition(self._own_block, self._own_stage, host)
        names = host.serial_names()
        trained = {parameter for group in basic.param_groups for parameter in group["params"]}
        self.optimizer = StateOptimizer(
            basic,
            names,
            self._own_key,
            loss_scaler(self),
            max(self.gradient_clipping() or 0.0, 0.0) or (0.0 if self._wants_norm else None),
            self._reduces,
            **self.composition.settings(trained, names) | self._configured(trained, self._own_block.offload_optimizer),
        )
        if not hasattr(self, "torch_autocast_enabled"):
            self.optimizer.dp_process_group = None  # which DeepSpeed 0.16 asks every optimizer for, in bf16
        self.composition.attach(self.optimizer)
        self.basic_optimizer = self.optimizer
        # The optimizer sums gradients while backward runs, and what is left when it steps.
        if "loss" in inspect.signature(self._backward_prologue).parameters:
            # Before 0.18 an engine that reduces no gradients does not divide the loss by its micro-batches either.
            self.allreduce_gradients = _nothing
        else:
            self.enable_backward_allreduce = False
        self.coalesce_grad_reduction = self._coalesced  # DeepSpeed's own asks for its ZeRO
        for name, configure in _ENDS.items():
            if hasattr(self, configure):
                setattr(self, name, getattr(self, configure)())

    def _configured(self, trained: set[nn.Parameter], offload: OffloadOptimizer | None) -> dict[str, Any]:
        """Settings of the optimizer that stand in DeepSpeed's sections."""
        raw = self._config.axonn_raw
        zero, made = section(raw, "zero_optimization"), dict[str, Any]()
        elements = zero.get("reduce_bucket_size")
        coarsened = offload is not None and "coarsening" in offload.model_fields_set
        if isinstance(elements, int | float) and trained and not coarsened:
            made["bucket_bytes"] = int(elements) * max(parameter.element_size() for parameter in trained)
        if section(raw, "data_types").get("grad_accum_dtype") in ("fp32", "float32"):
            made["gradient_dtype"] = torch.float32
        if self.bfloat16_enabled() and getattr(
            getattr(self._config, "bfloat16_config", None), "check_grad_overflow", True
        ):
            made["skip_nonfinite"] = True
        if not self.gradient_average:
            by = divisor(False, self.mesh.grid)
            made["group"] = lambda parameter: (sum_ranks(parameter, self.mesh)[0], by)
        return made | ({"host": True} if on(zero, "offload_optimizer") else {})

    @property
    def _wants_norm(self) -> bool:
        """False where the configuration says that nobody asks for the gradient's norm."""
        return section(self._config.axonn_raw, "zero_optimization").get("compute_grad_norm", True) is not False

    def _reduces(self) -> bool:
        # ZeRO-2 has room for a share of the sums only.
        due = self._own_stage == 2 or self.is_gradient_accumulation_boundary()
        return due and not self.inside_no_sync_ctxt

    def zero_grad(self) -> None:
        """Forget gradients that no step has consumed."""
        if self._owns:
            self.optimizer.zero_grad()
        super().zero_grad()

    @contextmanager
    def _coalesced(self) -> Iterator[None]:
        """The `coalesce_grad_reduction` of such an engine: backward passes inside only accumulate, and the sum is reduced once.

        Raises:
            ConfigError: a pipeline's engine, which does so with every batch.
        """
        if self.pipeline_parallelism:
            raise ConfigError(
                "engine.coalesce_grad_reduction is for backward passes of the script's own, and a pipeline reduces once a batch; leave it out"
            )
        with self.no_sync():
            yield
        self.optimizer.reducer.finish()

    # Steps and checkpoints

    def _take_model_step(self, *rest: Any, **keywords: Any) -> None:
        super()._take_model_step(*rest, **keywords)
        if self.composition is not None:
            self.composition.stepped()

    def _after_loading(self) -> None:
        if self.composition is not None:
            self.composition.loaded()
            # Gradients of the step that was begun are forgotten, and its microbatches with them.
            self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()
