"""The interface that DeepSpeed's engine expects of an optimizer that does its own gradient sums, clipping and loss scaling."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from torch import Tensor

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.deepspeed.optim.lamb import Lamb
from axonn_plugins.hosts.deepspeed.optim.muon import MuonWithAdam, muon
from axonn_plugins.optim.loss_scale import LossScale
from axonn_tp.comm.optimizer_trial import along, copy_without_state

Groups = list[dict[str, Any]]
# What DeepSpeed's Adams know and torch's do not.
_DEEPSPEED_ONLY = ("bias_correction", "adam_w_mode", "set_grad_none", "fp32_optimizer_states", "torch_adam", "step")


# What its Muon takes; it passes over what it does not know.
_OF_MUON = "lr momentum weight_decay ns_method muon_lr adam_lr betas eps adam_w_mode torch_adam fp32_optimizer_states foreach".split()


def check_optimizer(section: Mapping[str, Any], owned: bool) -> None:
    """Refuse an optimizer of the configuration that there is not, and parameters that it does not take; needs no engine.

    Args:
        section: "optimizer" of the configuration.
        owned: whether the suite runs it, and not DeepSpeed.

    Raises:
        ConfigError: names the parameter, or the nearest optimizer.
    """
    name, given = section.get("type"), dict(section.get("params") or {})
    if name is None or name.lower().startswith("mu") and name.lower() != "muon":  # which the package mup has
        return
    if "max_grad_norm" in given:
        raise ConfigError(
            "optimizer.params.max_grad_norm is read by no optimizer; write gradient_clipping, outside of optimizer"
        )
    try:
        if name.lower() == "muon":
            if strange := [each for each in given if each not in _OF_MUON]:
                raise TypeError(f"it has no {strange[0]}, but {', '.join(_OF_MUON)}")
        elif (kind := _kind_of(name, given, owned)).__module__.startswith("torch."):
            kind([torch.zeros(1, requires_grad=True)], **given)
        else:  # not made, which would compile it
            inspect.signature(kind).bind(None, **given)
    except (TypeError, ValueError) as error:
        said = re.sub(r"^\w+\.__init__\(\) ", "", str(error))
        raise ConfigError(f"optimizer.params of {name}: {said}; correct them") from None


def _kind_of(name: str, given: dict[str, Any], owned: bool) -> Any:
    """The class that a name stands for; of what is given is left what it takes."""
    if name.lower() in ("adam", "adamw"):
        by_torch = owned or given.get("torch_adam")
        for each in _DEEPSPEED_ONLY if by_torch else ("torch_adam", "fp32_optimizer_states"):
            given.pop(each, None)
        return torch.optim.AdamW if by_torch else deepspeed.ops.adam.FusedAdam
    if name.lower() in ("lamb", "lion"):
        return Lamb if name.lower() == "lamb" else deepspeed.ops.lion.FusedLion
    kind = torch.optim.Adagrad if name.lower() == "adagrad" else getattr(torch.optim, name, None)
    if not inspect.isclass(kind) or kind is torch.optim.Optimizer:
        known = ["Lamb", "Lion", *(each for each, kind in vars(torch.optim).items() if inspect.isclass(kind))]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ConfigError(f'optimizer.type = "{name}" is none of DeepSpeed\'s and torch\'s; the nearest is "{near}"')
    return kind


def loss_scaler(engine: DeepSpeedEngine) -> Any:
    """DeepSpeed's scaler of losses, as the engine's configuration has it; None where the loss is not scaled."""
    if not engine.fp16_enabled():
        return None
    return CreateLossScaler(
        dtype=torch.float16,
        static_loss_scale=engine.loss_scale(),
        dynamic_scaling=engine.dynamic_loss_scale(),
        dynamic_loss_args=engine.dynamic_loss_scale_args(),
    )


def basic_optimizer(engine: Any, given: Any, parameters: Any, key: str) -> torch.optim.Optimizer:
    """The optimizer that the script or the configuration names, of which ours makes its own.

    Args:
        engine: with the configuration.
        given: the script's: an optimizer, a function of the parameters, or None.
        parameters: what it trains, where it is not made.
        key: who runs it, for messages.

    Raises:
        ConfigError: the configuration says what torch's Adam does not know.
    """
    settings = dict(engine.optimizer_params() or {})
    if given is not None:
        made = given if isinstance(given, torch.optim.Optimizer) else given(parameters)
    elif engine.optimizer_name() in ("adam", "adamw"):
        # Torch's, where DeepSpeed's own would be compiled.
        decoupled = engine.optimizer_name() == "adamw" or settings.get("adam_w_mode", True)
        made = torch_adam(parameters, decoupled, settings)
    elif engine.optimizer_name() == "muon":
        made = muon(engine, parameters, settings)
    elif engine.optimizer_name() == "lamb":
        made = Lamb(parameters, **settings)
    else:
        made = engine._configure_basic_optimizer(parameters)
    made.param_groups[:] = [group for group in made.param_groups if group["params"]]
    engine._check_for_duplicates(made)
    return made


def torch_adam(parameters: Any, decoupled: bool, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Torch's AdamW, or Adam where weight decay is not decoupled, with what DeepSpeed's configuration says of its own."""
    known = {name: value for name, value in settings.items() if name not in _DEEPSPEED_ONLY}
    if not settings.get("torch_adam"):
        known.setdefault("weight_decay", 0.0)  # as DeepSpeed's own
    return (torch.optim.AdamW if decoupled else torch.optim.Adam)(parameters, **known)


def factory_of(
    optimizer: torch.optim.Optimizer, key: str, fused: bool = True
) -> Callable[[Groups], torch.optim.Optimizer]:
    """A function that makes the same optimizer over other parameter groups.

    Args:
        optimizer: torch's or DeepSpeed's.
        key: who runs the copy, for messages.
        fused: whether torch's Adam is fused where it may choose.

    Raises:
        ConfigError: it is one of DeepSpeed's own kernels, other than Adam.
    """
    kind = type(optimizer)
    if getattr(optimizer, "_optimizer_step_pre_hooks", None) or getattr(optimizer, "_optimizer_step_post_hooks", None):
        raise ConfigError(
            f"the optimizer has step hooks, and {key} makes another one of its kind, which would not call them; register them on "
            "engine.optimizer"
        )
    _refuse_own_weights(optimizer, key)
    if not kind.__module__.startswith(("deepspeed.", "torch.optim.")) and not hasattr(kind, "__del__"):
        # Its arguments need not be among its defaults, nor be called as its attributes are.
        return lambda groups: copy_without_state(optimizer, groups)
    settings = dict(optimizer.defaults)
    if kind.__module__.startswith("deepspeed.") and kind.__name__ == "MuonWithAuxAdam":
        kind, settings = MuonWithAdam, {"adam_w_mode": getattr(optimizer, "adam_w_mode", True)}
        _without_deepspeeds(optimizer.param_groups)
    elif kind.__module__.startswith("deepspeed.") and kind.__name__ == "FusedLamb":
        kind, settings = Lamb, {**settings, "eps_inside_sqrt": not getattr(optimizer, "eps_mode", 1)}
    elif kind.__module__.startswith("deepspeed."):
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
        settings = {name: value for name, value in settings.items() if name not in _DEEPSPEED_ONLY}
        _without_deepspeeds(optimizer.param_groups)
    if fused and kind in (torch.optim.Adam, torch.optim.AdamW):
        for group in [settings, *optimizer.param_groups]:
            if _may_fuse(group):
                group["fused"] = True
    accepted = inspect.signature(kind).parameters
    settings = {name: value for name, value in settings.items() if name in accepted}
    return lambda groups: kind(groups, **settings)  # type: ignore[arg-type]


def _refuse_own_weights(optimizer: torch.optim.Optimizer, key: str) -> None:
    """Refuse what tiles would not find, as the FusedAdam of apex and Transformer Engine keeps it where it is told.

    Raises:
        ConfigError: there is such; `key` is who runs it.
    """
    own = vars(optimizer)
    held = {name: own[name] for name in ("master_weights", "use_decoupled_grad") if own.get(name)}
    types = own.get("name_to_dtype_map", {})
    held |= {
        f"{name}_dtype": types[name]
        for name in ("exp_avg", "exp_avg_sq")
        if types.get(name) not in (None, torch.float32)
    }
    for name, value in held.items():
        raise ConfigError(
            f"the optimizer {type(optimizer).__name__} has {name} = {value}, and {key} keeps float32 weights, gradients and states itself; "
            "leave it out"
        )


def _without_deepspeeds(groups: Groups) -> None:
    for group in groups:
        for name in _DEEPSPEED_ONLY:
            group.pop(name, None)


def _may_fuse(group: Mapping[str, Any]) -> bool:
    free = group.get("fused") is None and not group.get("foreach")
    return free and not (group.get("differentiable") or group.get("capturable") or isinstance(group.get("lr"), Tensor))


class Scale(LossScale):
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


class EngineOptimizer(ZeROOptimizer):
    """The part of an optimizer that the engine talks to: it scales losses, and leaves the rest to the optimizer.

    Args:
        scaler: DeepSpeed's loss scaler; None where the loss is not scaled.
    """

    overflow: bool
    total_norm: Any

    def __init__(self, scaler: Any) -> None:
        if "__init__" in vars(ZeROOptimizer):  # not in older versions of DeepSpeed
            ZeROOptimizer.__init__(self)
        self.loss_scaler = scaler
        self.custom_loss_scaler, self.external_loss_scale, self.torch_autocast_gradscaler = False, None, None
        self._global_grad_norm: float | None = None

    def _go_on_from(self, basic: torch.optim.Optimizer) -> None:
        """Go on where an optimizer over the same parameters is; a scheduler that was made for it goes on working."""
        ours: Any = self
        if basic.state:
            for parameter, state in basic.state.items():
                # Made with the optimizer, as Adagrad's, in the 16 bits of the parameter; the step is by its float32 weights.
                half = parameter.dtype in (torch.float16, torch.bfloat16)
                made = {key: value for key, value in state.items() if half and along(value, parameter)}
                state.update({key: value.float() for key, value in made.items() if value.dtype == parameter.dtype})
            ours.load_state_dict(basic.state_dict())
            basic.state.clear()
        basic.param_groups = ours.param_groups
        # Torch's schedulers warn when the optimizer that they know has not stepped.
        basic._opt_called = True  # type: ignore[attr-defined]

    def _note_norm(self) -> None:
        norm = self.total_norm
        self._global_grad_norm = None if norm is None else float("inf") if self.overflow else float(norm)

    @property
    def cur_scale(self) -> float:
        """The loss scale in use."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the loss scale moves."""
        return self.loss_scaler is not None and self.loss_scaler.dynamic

    def needs_scaler(self) -> bool:
        """True if the engine is to refuse a backward pass of a loss that was not scaled; DeepSpeed asks about scales that move alone."""
        return self.cur_scale != 1

    def backward(self, loss: Tensor, retain_graph: bool = False, **keywords: Any) -> None:
        """Backward of the scaled loss; older engines of DeepSpeed call this, newer ones scale the loss themselves."""
        (loss * self.cur_scale).backward(retain_graph=retain_graph)


def optimizer_state_of(state_dict: Mapping[str, Any] | None, key: str) -> dict[str, Any]:
    """The optimizer state in a checkpoint of DeepSpeed, if it is a torch optimizer's.

    Raises:
        ConfigError: it is another's.
    """
    if state_dict is None or "param_groups" not in state_dict:  # ZeRO's is in files of its own
        raise ConfigError(
            f"this checkpoint's optimizer state is of another wrapper of DeepSpeed's, which {key} cannot read; load it with "
            "load_optimizer_states=False"
        )
    return dict(state_dict)
