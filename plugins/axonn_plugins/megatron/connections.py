"""The environment variable that Megatron asks for where a layer is split."""

from __future__ import annotations

import os
from typing import Any

import torch

from axonn_plugins.block import ConfigError
from axonn_plugins.megatron.settings import Settings

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_NEEDS_NONE_FROM = 10
"""The compute capability from which Megatron asks for no value: Blackwell's."""


def set_connections(args: Any, settings: Settings) -> None:
    """Set the variable to 1 where gx·gy > 1 and it has no value, before CUDA reads it; any value given is kept, for Megatron to judge.

    Raises:
        ConfigError: it has no value, the device needs it, and CUDA runs in this process already.
    """
    if settings.tensor == 1 or args.distributed_backend == "gloo" or VARIABLE in os.environ:
        return
    if not torch.cuda.is_initialized():
        os.environ[VARIABLE] = "1"
    elif torch.cuda.get_device_capability()[0] < _NEEDS_NONE_FROM:
        raise ConfigError(
            f"{VARIABLE} is not set, which Megatron needs at 1 where gx*gy = {settings.tensor} is more than 1, and CUDA runs already; "
            f"start the script with {VARIABLE}=1 in its environment"
        )
