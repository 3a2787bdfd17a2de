"""Our optimizer as Megatron's training wants one: states of kept elements only, in host memory, or shared out among ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor, nn

import samo
from axonn_plugins.config import Axonn, ConfigError
from axonn_plugins.hosts.common.composition import Composition
from axonn_plugins.hosts.megatron import process_groups, states_checkpoint
from axonn_plugins.hosts.megatron.arguments import fail
from axonn_plugins.hosts.megatron.host import WORDS, MegatronHost
from axonn_plugins.optim.flat import Factory
from axonn_tp import layout_of

HALVES = (torch.bfloat16, torch.float16)
_QK_NORMS = ("q_layernorm", "k_layernorm")


def factory_of(config: Any) -> Factory:
    """Torch's optimizer that does what Megatron's flags ask for.

    Args:
        config: an `OptimizerConfig` of adam or sgd.
    """
    common = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return lambda groups: torch.optim.SGD(groups, momentum=config.sgd_momentum, **common)
    kind = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
    betas = (config.adam_beta1, config.adam_beta2)
    return lambda groups: kind(groups, betas=betas, eps=config.adam_eps, fused=True, **common)


def scaler_of(config: Any) -> MegatronGradScaler | None:
    """Megatron's scaler of the loss; None where it is not scaled."""
    if config.loss_scale and (config.fp16 or config.bf16):
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


class Scale(samo.LossScale):
    """Megatron's scaler, moved by its own rules.

    Args:
        scaler: has the factor.
    """

    def __init__(self, scaler: MegatronGradScaler) -> None:
        self.scaler = scaler
        super().__init__(float(scaler.scale))

    @property
    def scale(self) -> float:  # type: ignore[override]
        """The scaler's."""
        return float(self.scaler.scale)

    @scale.setter
    def scale(self, value: float) -> None:
        """Left to the scaler."""

    def update(self, overflow: bool) -> None:
        """Let the scaler take note of how a step went."""
        self.scaler.update(overflow)


class StateOptimizer(MegatronOptimizer):
    """The optimizer of Megatron's training loop where states are ours.

    Until `begin` it has parameter groups alone, of which a scheduler and a checkpoint's reading know: masks and states are those
    of the weights and the step that were read.

    Args:
        groups: Megatron's, of the model's parameters.
        config: an `OptimizerConfig`.
        check: whether a gradient that is not a number ends the run, where the loss is not scaled.

    Attributes:
        optimizer: from `begin` on a `samo.Optimizer`.
        composition: the systems at work; from `begin` on.
    """

    is_stub_optimizer = False
    composition: Composition

    def __init__(self, groups: list[dict[str, Any]], config: Any, check: bool) -> None:
        self._factory = factory_of(config)
        super().__init__(self._factory(groups), config)
        self._check = check
        self.grad_scaler = scaler_of(config)
        self._one = torch.ones(1, device=process_groups.device())
        self._begun = False
        self._shared: dict[nn.Module, list[nn.Parameter]] = {}
        self._lent: list[nn.Parameter] = []
        self.notes: Mapping[str, Any] = {}
        self._read: Mapping[str, Any] | None = None

    def begin(self, chunks: list[Any], args: Any, block: Axonn, steps: int | None = None) -> None:
        """Make the states, of the weights as they are and of what was read; every rank calls it.

        Args:
            chunks: this rank's part of the model.
            args: Megatron's.
            block: the systems.
            steps: that were taken before; as many as iterations when None.

        Raises:
            ConfigError: the model cannot be pruned so; the same on every rank.
        """
        self.host = host = MegatronHost(chunks, self, args, steps)
        self.composition = Composition(block, args.axonn_stage, host, (WORDS,))
        names, parameters = host.serial_names(), self.get_parameters()
        masks = None if self._read is None else states_checkpoint.masks_in(self, self._read, names)
        settings = self.composition.settings(set(parameters), names, masks)
        groups = [
            {**group, "params": [(names[parameter], parameter) for parameter in group["params"]]}
            for group in self.param_groups
        ]
        wide = chunks[0].ddp_config.grad_reduce_in_fp32 and any(parameter.dtype in HALVES for parameter in parameters)
        try:
            self.optimizer = samo.Optimizer(
                self._factory,
                groups,
                # Megatron tells the norm also where nothing is clipped.
                max_norm=self.config.clip_grad if self.config.clip_grad > 0 else math.inf,
                loss_scale=None if self.grad_scaler is None else Scale(self.grad_scaler),
                gradient_dtype=torch.float32 if wide else None,
                **settings,
            )
        except ValueError as error:
            raise ConfigError(f"axonn: {error}") from None
        self._begun = True
        self.composition.attach(self.optimizer)
        if self._read is not None:
            states_checkpoint.take(self, self._read)
            self._read = None
        self.composition.loaded()

    # Gradients

    def lend(self, chunk: nn.Module) -> None:
        """Give a parameter a ``main_grad``, this rank's gradient, where Megatron sums it over other ranks than data-parallel ones.

        Args:
            chunk: of the model.
        """
        if chunk not in self._shared:
            names = self.host.serial_names()
            self._shared[chunk] = [one for one in chunk.parameters() if one.requires_grad and self._summed(one, names)]
        for parameter in self._shared[chunk]:
            parameter.main_grad = self.optimizer.gradient_of(parameter)  # type: ignore[attr-defined]
            self._lent.append(parameter)

    def _summed(self, parameter: nn.Parameter, names: Mapping[nn.Parameter, str]) -> bool:
        """True if a gradient is summed beyond its layout: copies of tied embeddings on other stages, and weights of each rank's own heads."""
        name = names[parameter]
        return (
            self.host.stages_with(name) > 1
            or (hasattr(parameter, "axonn_sum_over") and not layout_of(parameter).partial)
            or getattr(parameter, "average_gradients_across_tp_domain", False)
            or any(norm in name for norm in _QK_NORMS)
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that no step has consumed; those that come are summed in the step, once Megatron has summed parts."""
        while self._lent:
            del self._lent.pop().main_grad  # type: ignore[attr-defined]
        self.optimizer.zero_grad()
        self.optimizer.reducer.active = False

    def get_loss_scale(self) -> Tensor:
        """The factor of the loss."""
        return self._one if self.grad_scaler is None else self.grad_scaler.scale

    # Steps

    def prepare_grads(self) -> bool:
        """Nothing: `step` sums, unscales and clips."""
        return False

    def step_with_ready_grads(self) -> bool:
        """True if `step` was not skipped."""
        return bool(self.step()[0])

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, None]:
        """Sum gradients over data-parallel ranks, clip them and update.

        Returns:
            Whether the step was not skipped, the gradient's norm before clipping, and None: zeros are not counted.

        Raises:
            RuntimeError: the norm is not a number, and the run is to end then.
        """
        self.optimizer.step()
        self.host.steps += 1
        self.composition.stepped()
        norm = self.optimizer.total_norm
        if self.optimizer.overflow or norm is None:
            return not self.optimizer.overflow, None, None
        if self._check and not math.isfinite(norm):
            raise RuntimeError(
                f"the gradient's norm in iteration {self.host.steps} is {float(norm)}; lower --lr, or give "
                "--no-check-for-nan-in-loss-and-grad to go on"
            )
        return True, float(norm), None

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Take the float32 weights from the model's."""
        if self._begun:
            self.optimizer.refresh_masters()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Compressed states; where ranks share them every rank calls it."""
        return self.optimizer.state_dict()

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> dict[str, Any]:
        """Dense states in the form of Megatron's own optimizers, which read it, too; every rank calls it."""
        if is_loading and (metadata or {}).get("distrib_optim_sharding_type") is not None:
            fail(
                ConfigError(
                    "--load: its optimizer's state is that of Megatron's --use-distributed-optimizer, which our optimizer cannot read; save "
                    "it without that flag, or load it with --no-load-optim"
                )
            )
        return states_checkpoint.sharded(self, model_sharded_state_dict, is_loading)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep what was read for `begin`."""
        self._read = state_dict
