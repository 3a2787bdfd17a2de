"""The environment variable that Megatron asks for where a layer is split."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from axonn_plugins.config.base import ConfigError

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_NEEDS_NONE_FROM = 10
"""The compute capability from which Megatron asks for no value: Blackwell's."""


def set_connections(args: Any, sizes: Mapping[str, int | str]) -> None:
    """Set the variable to 1 where gx·gy > 1 and it has no value, before CUDA reads it; any value given is kept, for Megatron to judge.

    Args:
        args: Megatron's.
        sizes: gx and gy, which may still be auto: whoever chooses them may start CUDA.

    Raises:
        ConfigError: it has no value, the device needs it, and CUDA runs in this process already.
    """
    if sizes["gx"] == sizes["gy"] == 1 or args.distributed_backend == "gloo" or VARIABLE in os.environ:
        return
    if not torch.cuda.is_initialized():
        os.environ[VARIABLE] = "1"
    elif torch.cuda.get_device_capability()[0] < _NEEDS_NONE_FROM:
        raise ConfigError(
            f"{VARIABLE} is not set, which Megatron needs at 1 where gx*gy is more than 1, and CUDA runs in this process already; "
            f"start the script with {VARIABLE}=1 in its environment"
        )
