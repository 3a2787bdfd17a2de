"""The fingerprint of a rank that starts an engine, the same on every rank: the configuration, the arguments, the model, the versions.

Ranks on which a learning rate, a clipping or a width differs would train on, each by its own: `agreement.compare` has
them compare these facts, by name, so that what differs can be named.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from axonn_plugins import __version__

Facts = dict[str, str]
"""Facts by name, their values in words."""
MODEL = "the model's "
"""Begins the names of facts on which the stages of a pipeline differ."""
BY_RANK = {
    "local_rank": "a rank's own",
    "tensorboard": "one rank writes, where its node says",
    "csv_monitor": "one rank writes, where its node says",
    "wandb": "one rank writes, under its node's account",
    "comet": "one rank writes, under its node's account",
    "steps_per_print": "what a rank prints",
    "dump_state": "what a rank prints",
    "wall_clock_breakdown": "what a rank measures of itself",
    "memory_breakdown": "what a rank measures of itself",
    "flops_profiler": "what a rank measures of itself",
    "comms_logger": "what a rank measures of itself",
    "axonn.pccl.interfaces": "what a node calls its network",
}
"""Keys of the configuration that ranks may have each its own, and why."""
_PLACES = re.compile(r"(^|[._])(path|file|folder|dir|name_or_path)$")
"""Names of keys that say where on a node something lies."""
_DEVICE = re.compile(r"(cuda|xpu|npu|hpu):\d+|0x[0-9a-f]+")
"""Parts of a text that belong to this rank's device or memory."""


def of_configuration(raw: Mapping[str, Any]) -> Facts:
    """Every key of ds_config.json that ranks must agree on."""
    return {
        key: value
        for key, value in _flat(raw).items()
        if not _PLACES.search(key) and not any(key == own or key.startswith(f"{own}.") for own in BY_RANK)
    }


def of_versions() -> Facts:
    """The libraries that compute."""
    host = getattr(sys.modules.get("deepspeed"), "__version__", None)
    found = {"torch": torch.__version__, "deepspeed": host, "axonn-plugins": __version__}
    return {f"version of {name}": str(version) for name, version in found.items()}


def of_model(model: nn.Module) -> Facts:
    """Parameters, buffers, and what modules say of themselves, such as a dropout's probability."""
    facts = {f"{MODEL}class": type(model).__name__}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied = first.setdefault(id(parameter), name)
        facts[f"{MODEL}parameter {name}"] = f"that of {tied}" if tied != name else _of_tensor(parameter)
    for name, buffer in model.named_buffers():
        facts[f"{MODEL}buffer {name}"] = _of_tensor(buffer)
    for name, module in model.named_modules():
        # What a subclass says that holds others is their affair.
        if not any(module.children()):
            facts[f"{MODEL}layer {name}"] = _DEVICE.sub("", f"{type(module).__name__}({module.extra_repr()})")
    settings: dict[str, Any] = getattr(getattr(model, "config", None), "to_dict", dict)()
    return facts | {f"{MODEL}config.{key}": v for key, v in _flat(settings).items() if key and not _PLACES.search(key)}


def of_arguments(model: nn.Module, optimizer: Any, parameters: Any, scheduler: Any) -> Facts:
    """Facts on the arguments of `deepspeed.initialize`: the parameters that are trained, their options and their schedule."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    facts = {}
    if isinstance(optimizer, torch.optim.Optimizer):
        facts["optimizer"] = type(optimizer).__name__
        facts |= _of_groups("optimizer", optimizer.param_groups, names)
    elif optimizer is not None:
        facts["optimizer"] = getattr(optimizer, "__name__", type(optimizer).__name__)
    if parameters is not None:
        given = list(parameters)
        grouped = bool(given) and isinstance(given[0], Mapping)
        facts |= _of_groups("model_parameters", given if grouped else [{"params": given}], names)
    if scheduler is not None:
        facts["lr_scheduler"] = getattr(scheduler, "__name__", type(scheduler).__name__)
        own = scheduler.state_dict() if callable(getattr(scheduler, "state_dict", None)) else {}
        facts |= {f"lr_scheduler {key}": value for key, value in _flat(own).items()}
    return facts


def _of_groups(what: str, groups: Iterable[Mapping[str, Any]], names: Mapping[int, str]) -> Facts:
    facts = {}
    for number, group in enumerate(groups):
        members = group.get("params", ())
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        trained = [names.get(id(member), _of_tensor(member)) for member in members if isinstance(member, torch.Tensor)]
        facts[f"{MODEL}parameters in {what} group {number}"] = ", ".join(trained)
        rest = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        facts |= {f"{key} of {what} group {number}": value for key, value in _flat(rest).items()}
    return facts


def _of_tensor(tensor: torch.Tensor) -> str:
    trained = "trained" if tensor.requires_grad else "not trained"
    return f"{'x'.join(map(str, tensor.shape)) or 'one number'} {str(tensor.dtype).removeprefix('torch.')}, {trained}"


def _flat(value: Any, path: str = "") -> Facts:
    """Leaves of nested objects and lists by their paths."""
    if isinstance(value, Mapping):
        found: Facts = {}
        for key in value:
            found |= _flat(value[key], f"{path}.{key}" if path else str(key))
        return found or {path: "{}"}
    return {path: _in_words(value)}


def _in_words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.tolist()) if value.numel() == 1 else _of_tensor(value)
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        pass
    if isinstance(value, (list, tuple, set, frozenset)):
        return f"[{', '.join(sorted(_in_words(v) for v in value) if isinstance(value, (set, frozenset)) else map(_in_words, value))}]"
    if isinstance(value, (torch.dtype, torch.device)):
        return _DEVICE.sub(r"\1", str(value))
    return getattr(value, "__qualname__", type(value).__qualname__)
