"""Other ranks' experts taken out of all that a script has handed over before those in lists were dealt out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from axonn_plugins.config import ConfigError
from axonn_tp.checkpoint.dealt import still_here


def let_go(optimizer: Any, keywords: dict[str, Any]) -> None:
    """Take other ranks' experts out of the script's optimizer and ``model_parameters``; every rank calls it.

    Args:
        optimizer: the script's, or a function that makes one, or None.
        keywords: of `deepspeed.initialize`.

    Raises:
        ConfigError: ranks would have other groups of parameters; on every rank.
    """
    given = keywords.get("model_parameters")
    if given is not None:
        given = keywords["model_parameters"] = still_here(given)
    groups = list(given or ())
    if isinstance(optimizer, torch.optim.Optimizer):
        groups += still_here(optimizer.param_groups)
    filled = [bool(group["params"]) for group in groups if isinstance(group, dict)]
    everyone: list[list[bool]] = [filled] * dist.get_world_size()
    dist.all_gather_object(everyone, filled)
    if any(other != filled for other in everyone):
        raise ConfigError(
            "axonn.ted: a group of the optimizer's parameters has some experts of a list alone, so that ranks with others would not have it; put all "
            "experts of a list into one group"
        )
