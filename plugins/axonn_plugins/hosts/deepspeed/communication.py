"""DeepSpeed's collectives by pccl, where the block says so.

DeepSpeed makes its process group before it reads its configuration. So the group of all ranks' backend for the tensors that
DeepSpeed trains on is exchanged then; what DeepSpeed and the mesh make afterwards inherits it. DeepSpeed's own calls, its timers and its
comms_logger see no difference.
"""

from __future__ import annotations

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups

from axonn_plugins.config import ConfigError, Pccl
from axonn_plugins.pccl import world
from axonn_plugins.pccl.build import BuildError
from axonn_plugins.pccl.links import LinkError


def use(block: Pccl) -> None:
    """Exchange the backend; where no process group exists yet, the configuration is read again when one does.

    Raises:
        ConfigError: it cannot be done.
    """
    device = get_accelerator().device_name().split(":")[0]
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f"axonn.pccl works on CPU and CUDA tensors, and DeepSpeed trains on {device}; remove axonn.pccl, or set DS_ACCELERATOR=cpu"
        )
    if not dist.is_initialized():
        return
    try:
        changed = world.take(block.options(), device)
    except (BuildError, LinkError, ValueError) as error:
        raise ConfigError(f"axonn.pccl: {str(error).removeprefix('pccl: ')}") from None
    if changed:
        _forget_groups()


def step_aside() -> None:
    """The configuration now parsed has no such block."""
    if world.give_back():
        _forget_groups()


def _forget_groups() -> None:
    # DeepSpeed keeps its copy of the group of all ranks from one engine to the next.
    groups._WORLD_GROUP = None
