"""LitGPT's command line with ``AXONN_STRATEGY`` set: the strategies that it names are ours, and it counts readers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from types import ModuleType
from typing import Any

from axonn_plugins.hosts.lightning.settings import from_environment, parse

_THEIRS = ("FSDPStrategy", "ModelParallelStrategy")
_DRAWS = (
    "litgpt.finetune.lora",
    "litgpt.finetune.adapter",
    "litgpt.finetune.adapter_v2",
)
"""Modules that draw weights of their own while the model is made, which one process draws in that order."""

_ALONE = "litgpt.finetune.lora"
"""Generates an example on the first rank alone, which has only a part of the model."""


def patch_script(module: ModuleType) -> None:
    """Add to one of LitGPT's training scripts; nothing without the variable."""
    if from_environment() is None:
        return
    for name in _THEIRS:
        if hasattr(module, name):
            setattr(module, name, _strategy(module.__name__ not in _DRAWS))
    for name, wrapped in _REPLACED.items():
        if hasattr(module, name):
            setattr(module, name, wrapped(getattr(module, name)))
    if module.__name__ == _ALONE:
        module.generate_example = _left_out  # type: ignore[attr-defined]


def _strategy(without_memory: bool) -> type:
    """The class that stands for theirs."""
    from axonn_plugins.hosts.lightning.fabric import FabricStrategy

    class LitGPTStrategy(FabricStrategy):
        """`AxonnStrategy` with the arguments of the environment."""

        def __init__(self, *rest: Any, **theirs: Any) -> None:
            super().__init__(**(from_environment() or {}))

        def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager:
            return super().module_init_context(empty_init and without_memory)

    return LitGPTStrategy


def _as_serial(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def generate_example(fabric: Any, model: Any, *rest: Any, **named: Any) -> Any:
        """LitGPT's own, which keeps keys and values of all heads."""
        from axonn_plugins.hosts.lightning.strategy import AxonnStrategy
        from axonn_tp import as_serial

        if not isinstance(fabric.strategy, AxonnStrategy):
            return original(fabric, model, *rest, **named)
        with as_serial(model.module, fabric.strategy.mesh):
            return original(fabric, model, *rest, **named)

    return generate_example


def _left_out(fabric: Any, *rest: Any, **named: Any) -> None:
    """Takes the place of an example that one rank generates."""
    fabric.print("axonn: no example is generated, for LitGPT lets the first rank do it alone, and the model is split")


def _in_parts(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_checkpoint(fabric: Any, model: Any, checkpoint_path: Any, strict: bool = True) -> None:
        """LitGPT's own, for a model that takes its parts of tensors, which LitGPT reads whole."""
        import torch

        state = torch.load(checkpoint_path, mmap=True, map_location="cpu", weights_only=True)
        model.load_state_dict(state.get("model", state), strict=strict)

    return load_checkpoint


def _over_readers(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def validate(fabric: Any, *rest: Any, **named: Any) -> Any:
        """LitGPT's own, and the mean of all readers' losses."""
        found = original(fabric, *rest, **named)
        return fabric.all_reduce(found.clone().to(fabric.device)).to(found.device)

    return validate


def _mean_of_readers(original: Any) -> type:
    class RunningMean(original):
        """The mean over all readers."""

        def compute(self) -> Any:
            from axonn_plugins.hosts.lightning.replicas import mean_over_readers

            return mean_over_readers(super().compute())

    return RunningMean


_REPLACED: dict[str, Callable[[Any], Any]] = {
    "generate_example": _as_serial,
    "load_checkpoint": _in_parts,
    "validate": _over_readers,
    "RunningMean": _mean_of_readers,
}


def patch_args(module: ModuleType) -> None:
    """Add to ``litgpt.args``: batches are dealt out to readers; nothing without the variable."""
    given = from_environment()
    original = module.TrainArgs.batch_size
    if given is None or getattr(original, "axonn", False):
        return
    settings = parse(given.get("gx", 1), given.get("gy", 1), given.get("gz", 1), "auto", None, "full")

    @wraps(original)
    def batch_size(self: Any, devices: int, num_nodes: int = 1) -> int:
        if devices * num_nodes == 1:
            return original(self, devices, num_nodes)
        return original(self, settings.grid(devices * num_nodes).batch)

    batch_size.axonn = True  # type: ignore[attr-defined]
    module.TrainArgs.batch_size = batch_size
