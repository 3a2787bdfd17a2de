"""The part of an engine whose gradients and optimizer states are ours: compressed, shared out over ranks, or in host memory.

DeepSpeed then takes itself for stage 0 of ZeRO, and its own sum of gradients does not run: `samo.Optimizer` sums them over
the ranks that each parameter's layout names.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import samo
from axonn_plugins import __version__
from axonn_plugins.config import Axonn, ConfigError
from axonn_plugins.config.offload_optimizer import OffloadOptimizer
from axonn_plugins.config.samo import Samo
from axonn_plugins.hosts.deepspeed.checkpoint.checked import CheckedCheckpoints
from axonn_plugins.hosts.deepspeed.optim.states import StateOptimizer, torch_adam
from axonn_plugins.hosts.deepspeed.optim.wrapped import loss_scaler
from axonn_plugins.hosts.deepspeed.states_config import owned
from axonn_plugins.samo.pruning import Masks, Pruning
from axonn_tp import Mesh, layout_of
from axonn_tp.checkpoint.dealt import DealtNames
from axonn_tp.comm.gradients import sum_ranks

_AXES = ("x", "y", "z", "data")


@dataclass(frozen=True)
class States:
    """What the block asks of the optimizer's states.

    Attributes:
        samo: how the model is pruned; None: it is not.
        offload: that states are in host memory; None: they are on the device.
        stage: of ZeRO: 1 shares states out over the ranks that sum a parameter's gradients, 2 gradients as well.
    """

    samo: Samo | None
    offload: OffloadOptimizer | None
    stage: int

    @classmethod
    def asked(cls, block: Axonn, stage: int) -> States | None:
        """What a block asks for at a stage of ZeRO; None: DeepSpeed's own optimizers do."""
        if not owned(block, stage):
            return None
        shared = 1 if block.samo is not None and block.samo.shard else 0
        return cls(block.samo, block.offload_optimizer, max(stage, shared))

    @property
    def key(self) -> str:
        """Of the block, for messages."""
        return "axonn.samo" if self.samo is not None else "axonn.offload_optimizer" if self.offload else "axonn"


class OwnStates(CheckedCheckpoints):
    """The part of an engine that makes the optimizer."""

    optimizer: Any
    mesh: Mesh
    _states: States | None = None
    _pruning: Pruning | None = None

    # What a pipeline or experts know better

    def _serial_names(self) -> Mapping[nn.Parameter, str]:
        """Parameters' names in the serial model."""
        names = DealtNames(self.module)
        return {parameter: names.outward(name) for name, parameter in self.module.named_parameters()}

    def _copies(self, name: str) -> int:
        """How many stages of a pipeline hold a parameter."""
        return 1

    def _counts(self, parameter: Tensor) -> bool:
        """Whether this rank counts a parameter in a sum over all ranks."""
        layout = layout_of(parameter)
        return layout.counted_here(self.mesh.over(layout.grid).coordinates, _AXES)

    # Optimizer

    def _configure_basic_optimizer(self, model_parameters: list[Any]) -> torch.optim.Optimizer:
        """Torch's Adam for DeepSpeed's, which need not be compiled then."""
        name, settings = self.optimizer_name(), dict(self.optimizer_params() or {})
        if self._states is None or name not in ("adam", "adamw") or "max_grad_norm" in settings:
            return super()._configure_basic_optimizer(model_parameters)
        decoupled = name == "adamw" or settings.get("adam_w_mode", True)
        return torch_adam(model_parameters, decoupled, settings, self._states.key)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        super()._configure_optimizer(client_optimizer, model_parameters)
        if self._states is not None:
            dtype = torch.float16 if self.fp16_enabled() else None
            self.optimizer = self._own(self.optimizer, None if dtype is None else loss_scaler(self, dtype))
            self.basic_optimizer = self.optimizer.states

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
        """Which of DeepSpeed's wrappers the optimizer gets: none where ours wraps it."""
        return None if self._states is not None else super()._do_optimizer_sanity_check(basic_optimizer)

    def _own(self, basic: torch.optim.Optimizer, scaler: Any) -> StateOptimizer:
        assert self._states is not None
        names, offload = self._serial_names(), self._states.offload
        masks: Masks | None = None
        if self._states.samo is not None:
            trained = {parameter for group in basic.param_groups for parameter in group["params"]}
            self._pruning = Pruning(self._states.samo, self.module, trained, self.mesh, names, self._copies)
            masks = self._pruning.first()
        settings = {} if offload is None else {"tile_size": offload.bucket_size // 2}
        made = StateOptimizer(
            basic,
            names,
            self._states.key,
            scaler,
            self.gradient_clipping(),
            masks=masks,
            group=lambda parameter: sum_ranks(parameter, self.mesh),
            stage=self._states.stage,
            host=offload is not None,
            norm=self._square_of_all,
            **settings,
        )
        if masks is not None:
            self._pruned(masks, made.states)
        return made

    def _square_of_all(self, squares: dict[str, Tensor]) -> Tensor:
        """The square of the whole model's norm, in which each parameter counts once."""
        counted = [
            square.double().to(self.device) for name, square in squares.items() if self._counts(self._named[name])
        ]
        total = torch.stack(counted).sum() if counted else torch.zeros((), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total

    @property
    def _named(self) -> dict[str, nn.Parameter]:
        return {entry.name: entry.parameter for entry in self.optimizer.states.entries}

    def _scheduler_from_config(self, optimizer: Any) -> Any:
        return super()._scheduler_from_config(optimizer if self._states is None else optimizer.states)

    # Gradients

    def _set_reduction(self) -> None:
        if self._states is not None:
            self.optimizer.reduce_in_backward(self.is_gradient_accumulation_boundary() and not self.inside_no_sync_ctxt)

    def backward(self, *inputs: Any, **keywords: Any) -> Any:  # noqa: D102
        self._set_reduction()
        return super().backward(*inputs, **keywords)

    def _backward_prologue(self) -> None:
        self._set_reduction()
        super()._backward_prologue()

    def buffered_allreduce_fallback(self, *rest: Any, **keywords: Any) -> None:
        """DeepSpeed's, where gradients are not ours: those are summed while backward runs, and the rest in the step."""
        if self._states is None:
            super().buffered_allreduce_fallback(*rest, **keywords)

    def clip_fp32_gradients(self) -> None:
        """DeepSpeed's, where the optimizer does not clip when it steps."""
        if self._states is None:
            super().clip_fp32_gradients()

    def zero_grad(self) -> None:
        """Forget gradients that no step has consumed."""
        if self._states is not None:
            self.optimizer.zero_grad()
        super().zero_grad()

    # Pruning

    def _take_model_step(self, *rest: Any, **keywords: Any) -> None:
        super()._take_model_step(*rest, **keywords)
        self._prune_when_due()

    def _prune_when_due(self) -> None:
        masks = None if self._pruning is None else self._pruning.after(self.global_steps)
        if masks is not None:
            self.optimizer.prune(masks)
            self._pruned(masks, self.optimizer.states)

    def _forget_masks(self) -> None:
        """Be dense, as the checkpoint of a run without the block that is to be read."""
        if self._pruning is not None:
            self.optimizer.prune(self._pruning.forget())

    def _after_loading(self) -> None:
        """A model that comes dense is pruned at once if its step is beyond `start_step`."""
        if not self._searching:
            self._prune_when_due()

    @property
    def _searching(self) -> bool:
        return self._states is not None and self._states.samo is not None and self._states.samo.search is not None

    def _pruned(self, masks: Masks, optimizer: samo.Optimizer) -> None:
        """Note that the model is pruned; rank 0 prints what its part keeps, by layer."""
        assert self._pruning is not None
        self._pruning.take(masks)
        if dist.get_rank() == 0:
            table = samo.sparsity_table(masks, self._pruning.parameters.items())
            size = f"{optimizer.nbytes / 2**20:,.1f} MiB of weights, gradients and state"
            print(
                f"axonn {__version__}: SAMO: pruned after step {self.global_steps}; {size}\n{table}",
                file=sys.stderr,
                flush=True,
            )


def check_has_optimizer(states: States | None, optimizer: Any, config_class: Any) -> None:
    """Refuse an engine without an optimizer whose states are to be ours.

    Raises:
        ConfigError: there is none.
    """
    if states is not None and optimizer is None and not config_class.optimizer_name:
        raise ConfigError(
            f"{states.key} is about an optimizer's state, and there is no optimizer; add the section optimizer, or pass one to "
            "deepspeed.initialize"
        )
