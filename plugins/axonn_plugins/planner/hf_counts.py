"""Parameters of a model as its own class in transformers makes them: biases, positions, towers for images and all else included."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any


def counted(table: Mapping[str, Any]) -> int | None:
    """Number of parameters that the class of a config.json makes, without memory for them.

    Args:
        table: its keys.

    Returns:
        The number, a tied one once; None where transformers is not installed, or has no class that builds it.
    """
    with contextlib.suppress(Exception):  # whatever a stranger's class raises; the planner's own count is good then
        import torch
        import transformers

        config = transformers.CONFIG_MAPPING[table["model_type"]].from_dict(dict(table))
        level = logging.getLogger("transformers").level
        logging.getLogger("transformers").setLevel(logging.ERROR)
        try:
            with torch.device("meta"):
                network = _class(transformers, table, config)._from_config(config)
            network.tie_weights()
        finally:
            logging.getLogger("transformers").setLevel(level)
        return sum(parameter.numel() for parameter in network.parameters())
    return None


def _class(transformers: Any, table: Mapping[str, Any], config: Any) -> Any:
    """The class which the configuration names; else that of texts, of images and texts, or the bare one."""
    named = next((name for name in table.get("architectures") or () if hasattr(transformers, name)), None)
    if named is not None:
        return getattr(transformers, named)
    every = (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        transformers.MODEL_MAPPING,
    )
    return next(known[type(config)] for known in every if type(config) in known)
