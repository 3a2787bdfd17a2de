"""The part of an engine whose gradients and optimizer states are ours: compressed, shared out over ranks, or in host memory.

DeepSpeed then takes itself for stage 0 of ZeRO, and its own sum of gradients does not run: `samo.Optimizer` sums them over
the ranks that each parameter's layout names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from axonn_plugins.config import Axonn, ConfigError
from axonn_plugins.hosts.deepspeed.checkpoint.checked import CheckedCheckpoints
from axonn_plugins.hosts.deepspeed.optim.wrapped import loss_scaler
from axonn_plugins.hosts.deepspeed.states_config import owner
from axonn_tp import Mesh, layout_of
from axonn_tp.checkpoint.dealt import DealtNames

if TYPE_CHECKING:
    from axonn_plugins.hosts.common.composition import Composition
    from axonn_plugins.samo.pruning import Pruning

_AXES = ("x", "y", "z", "data")


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
        """How many stages of a pipeline hold a parameter of this name."""
        return self._engine._copies(name)

    def counts(self, parameter: Tensor) -> bool:
        """Whether this rank counts a parameter in a sum over all ranks."""
        return self._engine._counts(parameter)


class OwnStates(CheckedCheckpoints):
    """The part of an engine that makes the optimizer."""

    optimizer: Any
    mesh: Mesh
    _own_block: Axonn | None = None
    _own_stage, _own_key = 0, "axonn"
    composition: Composition | None = None

    def _own_states(self, config_class: Any, optimizer: Any) -> None:
        """See whether the block asks for states of our own; call first.

        Raises:
            ConfigError: it does, and there is no optimizer.
        """
        block, stage = config_class.axonn, config_class.axonn_stage
        found = owner(block, stage)
        if found is None:
            return
        self._own_key = f"axonn.{found}"
        self._own_block, self._own_stage = block, stage
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

    def _configure_basic_optimizer(self, model_parameters: list[Any]) -> torch.optim.Optimizer:
        """Torch's Adam for DeepSpeed's, which need not be compiled then."""
        name, settings = self.optimizer_name(), dict(self.optimizer_params() or {})
        if not self._owns or name not in ("adam", "adamw") or "max_grad_norm" in settings:
            return super()._configure_basic_optimizer(model_parameters)
        from axonn_plugins.hosts.deepspeed.optim.states import torch_adam

        decoupled = name == "adamw" or settings.get("adam_w_mode", True)
        return torch_adam(model_parameters, decoupled, settings, self._own_key)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        super()._configure_optimizer(client_optimizer, model_parameters)
        if self._own_block is None:
            return
        # Only here is `samo` needed, a name that a user's folder may have.
        from axonn_plugins.hosts.common.composition import Composition
        from axonn_plugins.hosts.deepspeed.optim.states import StateOptimizer

        basic, host = self.optimizer, EngineHost(self)
        self.composition = Composition(self._own_block, self._own_stage, host)
        scaler, names = (loss_scaler(self, torch.float16) if self.fp16_enabled() else None), host.serial_names()
        trained = {parameter for group in basic.param_groups for parameter in group["params"]}
        settings = self.composition.settings(trained, names)
        self.optimizer = StateOptimizer(basic, names, self._own_key, scaler, self.gradient_clipping(), **settings)
        self.composition.attach(self.optimizer.states)
        self.basic_optimizer = self.optimizer.states

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
        """Which of DeepSpeed's wrappers the optimizer gets: none where ours wraps it."""
        return None if self._owns else super()._do_optimizer_sanity_check(basic_optimizer)

    def _scheduler_from_config(self, optimizer: Any) -> Any:
        return super()._scheduler_from_config(optimizer.states if self._owns else optimizer)

    # Gradients

    def _set_reduction(self) -> None:
        if self._owns:
            self.optimizer.reduce_in_backward(self.is_gradient_accumulation_boundary() and not self.inside_no_sync_ctxt)

    def backward(self, *inputs: Any, **keywords: Any) -> Any:  # noqa: D102
        self._set_reduction()
        return super().backward(*inputs, **keywords)

    def _backward_prologue(self) -> None:
        self._set_reduction()
        super()._backward_prologue()

    def buffered_allreduce_fallback(self, *rest: Any, **keywords: Any) -> None:
        """DeepSpeed's, where gradients are not ours: those are summed while backward runs, and the rest in the step."""
        if not self._owns:
            super().buffered_allreduce_fallback(*rest, **keywords)

    def clip_fp32_gradients(self) -> None:
        """DeepSpeed's, where the optimizer does not clip when it steps."""
        if not self._owns:
            super().clip_fp32_gradients()

    def zero_grad(self) -> None:
        """Forget gradients that no step has consumed."""
        if self._owns:
            self.optimizer.zero_grad()
        super().zero_grad()

    # Steps and checkpoints

    def _take_model_step(self, *rest: Any, **keywords: Any) -> None:
        super()._take_model_step(*rest, **keywords)
        if self.composition is not None:
            self.composition.stepped()

    def _after_loading(self) -> None:
        if self.composition is not None:
            self.composition.loaded()
