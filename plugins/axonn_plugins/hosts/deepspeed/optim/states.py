"""Our optimizer as DeepSpeed's engine wants one, made from that which the configuration or the script names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor

import samo
from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.deepspeed.optim.wrapped import Groups, WrappedOptimizer
from axonn_plugins.hosts.deepspeed.sections import needs_whole_matrices

# What DeepSpeed's Adams know and torch's do not.
_DEEPSPEED_ONLY = ("bias_correction", "adam_w_mode", "set_grad_none", "fp32_optimizer_states", "torch_adam", "step")


def torch_adam(
    parameters: Any, decoupled: bool, settings: Mapping[str, Any], key: str = "axonn.samo"
) -> torch.optim.Optimizer:
    """Torch's AdamW, or Adam where weight decay is not decoupled, with what DeepSpeed's configuration says of its own.

    Raises:
        ConfigError: it says what torch's do not know; `key` is who runs it.
    """
    known = {key: value for key, value in settings.items() if key not in _DEEPSPEED_ONLY}
    try:
        return (torch.optim.AdamW if decoupled else torch.optim.Adam)(parameters, **known)
    except TypeError as error:
        raise ConfigError(
            f"optimizer.params does not fit torch's Adam, which {key} runs: {error}; remove what it does not know"
        ) from None


def factory_of(
    optimizer: torch.optim.Optimizer, key: str = "axonn.samo", fused: bool = True
) -> Callable[[Groups], torch.optim.Optimizer]:
    """A function that makes the same optimizer over other parameter groups.

    Args:
        optimizer: torch's or DeepSpeed's.
        key: who runs the copy, for messages.
        fused: whether torch's Adam is fused where it may choose.

    Raises:
        ConfigError: it is one of DeepSpeed's own kernels, other than Adam, or needs whole matrices.
    """
    kind = type(optimizer)
    if needs_whole_matrices(kind.__name__):
        raise ConfigError(
            f"the optimizer {kind.__name__} looks at more than one weight at a time, and {key} has a part of them at a time; "
            "use an element-wise one such as AdamW"
        )
    settings = dict(optimizer.defaults)
    if kind.__module__.startswith("deepspeed."):
        if "Adam" not in kind.__name__:
            raise ConfigError(
                f"the optimizer {kind.__name__} is DeepSpeed's own kernel, which {key} cannot run in parts; use Adam, AdamW, SGD or "
                "another of torch's"
            )
        kind = torch.optim.AdamW if getattr(optimizer, "adam_w_mode", True) else torch.optim.Adam
        if not settings.get("bias_correction", True):
            raise ConfigError(
                f"the optimizer's bias_correction = False is unknown to torch's Adam, which {key} runs; leave it out"
            )
        settings = {key: value for key, value in settings.items() if key not in _DEEPSPEED_ONLY}
        for group in optimizer.param_groups:
            for key in _DEEPSPEED_ONLY:
                group.pop(key, None)
    if fused and kind in (torch.optim.Adam, torch.optim.AdamW):
        for group in [settings, *optimizer.param_groups]:
            if _may_fuse(group):
                group["fused"] = True
    accepted = inspect.signature(kind).parameters
    settings = {key: value for key, value in settings.items() if key in accepted}
    return lambda groups: kind(groups, **settings)  # type: ignore[arg-type]


def _may_fuse(group: Mapping[str, Any]) -> bool:
    free = group.get("fused") is None and not group.get("foreach")
    return free and not (group.get("differentiable") or group.get("capturable") or isinstance(group.get("lr"), Tensor))


class Scale(samo.LossScale):
    """DeepSpeed's loss scaler, moved by its own rules; also where a checkpoint changes it.

    Args:
        scaler: of `deepspeed.runtime.fp16.loss_scaler`.
    """

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        super().__init__(scaler.loss_scale, dynamic=scaler.dynamic)

    @property
    def scale(self) -> float:  # type: ignore[override]
        """The scaler's."""
        return self.scaler.loss_scale

    @scale.setter
    def scale(self, value: float) -> None:
        """Left to the scaler."""

    def update(self, overflow: bool) -> None:
        """Let the scaler take note of how a step went."""
        self.scaler.update_scale(overflow)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's numbers."""
        return {key: value for key, value in vars(self.scaler).items() if isinstance(value, bool | int | float)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Numbers of a scaler of the same kind; those of a static one are nothing to a dynamic one, nor the reverse."""
        if state.keys() == self.state_dict().keys():
            vars(self.scaler).update(state)


class StateOptimizer(WrappedOptimizer):
    """What the engine holds as its optimizer where the states are ours: compressed, shared out over ranks, or in host memory.

    Args:
        basic: the optimizer that the configuration or the script named; its parameter groups become `samo.Optimizer`'s, so
            that a scheduler made for it goes on working, and its state is taken over.
        names: of the model's parameters.
        key: of the block, for messages.
        scaler: DeepSpeed's loss scaler; None where the loss is not scaled.
        clip_grad: largest norm of the gradient, 0 for no clipping.
        settings: of `samo.Optimizer`.

    Attributes:
        states: does the work.

    Raises:
        ConfigError: the optimizer is not element-wise.
    """

    def __init__(
        self,
        basic: torch.optim.Optimizer,
        names: Mapping[torch.nn.Parameter, str],
        key: str,
        scaler: Any,
        clip_grad: float,
        **settings: Any,
    ) -> None:
        super().__init__(scaler)
        self.key = key
        factory, number = factory_of(basic, key), count()
        groups = [
            {key: value for key, value in given.items() if key != "param_names"}
            | {"params": [(names.get(p) or f"outside.{next(number)}", p) for p in given["params"]]}
            for given in basic.param_groups
        ]
        scale = None if scaler is None else Scale(scaler)
        with self._in_words():
            self.states = samo.Optimizer(factory, groups, max_norm=clip_grad or None, loss_scale=scale, **settings)
        self._take_over(basic, self.states)

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ConfigError(f"{self.key}: {error}") from None

    def reduce_in_backward(self, active: bool) -> None:
        """Whether the backward passes that follow reduce gradients, or accumulate them only."""
        self.states.reducer.active = active

    def step(self, closure: Any = None) -> None:
        """Reduce what is left, unscale, clip, and update kept elements; skip the step when a gradient is not finite."""
        self.states.step()
        norm = self.states.total_norm
        self._global_grad_norm = None if norm is None else float("inf") if self.overflow else norm.item()

    def backward(self, loss: Tensor, retain_graph: bool = False, **keywords: Any) -> None:
        """Backward of the scaled loss; older engines of DeepSpeed call this, newer ones scale the loss themselves."""
        self.states.scale(loss).backward(retain_graph=retain_graph)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that no step has consumed."""
        self.states.zero_grad()

    def prune(self, masks: Mapping[str, Tensor]) -> None:
        """Prune from now on; state of what is kept stays.

        Raises:
            ConfigError: masks of other parameters.
        """
        with self._in_words():
            self.states.prune(masks)

    def destroy(self) -> None:
        """Leave the model's parameters alone."""
        self.states.release()

    def refresh_fp32_params(self) -> None:
        """Set the float32 weights from the parameters."""
        self.states.refresh_masters()

    def state_dict(self) -> dict[str, Any]:
        """Of all this rank's parameters; every rank calls it."""
        return self.states.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        """What `state_dict` returned on any ranks, or a torch optimizer's of the dense model.

        Raises:
            ConfigError: it is of other parameters, or none of these.
        """
        if "param_groups" not in state_dict:
            raise ConfigError(
                f"this checkpoint's optimizer state is of another wrapper of DeepSpeed's, which {self.key} cannot read; load it with "
                "load_optimizer_states=False"
            )
        with self._in_words():
            self.states.load_state_dict(state_dict)
