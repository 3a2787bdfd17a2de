"""``generate`` on ranks that gather weights from each other: all call the model equally often, as with ZeRO-3; else nothing is different."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from torch import nn


def patch(module: ModuleType) -> None:
    """Add to ``transformers.generation.utils``; harmless when called again."""
    kind = module.GenerationMixin
    if not getattr(kind.generate, "axonn", False):
        kind.generate = _together(kind.generate)


def _together(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def generate(self: Any, *given: Any, **keywords: Any) -> Any:
        """The model's own; a rank whose sequences have ended goes on until those of all have."""
        if gathers(self):
            keywords["synced_gpus"] = True
        return original(self, *given, **keywords)

    generate.axonn = True  # type: ignore[attr-defined]
    return generate


def gathers(model: nn.Module) -> bool:
    """True if ranks that read different data need each other for the model's forward."""
    layouts = [(parameter, getattr(parameter, "axonn_layout", None)) for parameter in model.parameters()]
    return any(
        layout is not None and (layout.home or layout.over_z and parameter.dim() < len(layout.shape))  # flat, over z
        for parameter, layout in layouts
    )
