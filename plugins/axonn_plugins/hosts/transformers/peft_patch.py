"""PEFT's adapters of split layers, saved as its own files; without the block nothing is different."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from types import ModuleType
from typing import Any


def patch(module: ModuleType) -> None:
    """Add to ``peft.peft_model``; harmless when called again."""
    model = module.PeftModel
    original = model.save_pretrained
    if not getattr(original, "axonn", False):
        model.save_pretrained = _saving(original)


def _saving(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def save_pretrained(self: Any, *given: Any, **keywords: Any) -> None:
        """PEFT's; where it is given whole tensors, as rank 0 alone is, it asks layers for names only."""
        from axonn_tp.layers.exports import as_shards

        with nullcontext() if keywords.get("state_dict") is None else as_shards():
            original(self, *given, **keywords)

    save_pretrained.axonn = True  # type: ignore[attr-defined]
    return save_pretrained
