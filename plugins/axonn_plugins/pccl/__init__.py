"""PCCL: hierarchical collectives with few steps, after chapter 6 of the dissertation."""

from __future__ import annotations

from typing import Any

from axonn_plugins.pccl import coalescing, default_timeout, watched_barrier
from axonn_plugins.pccl.options import Options

__all__ = ["Options", "register"]


def register() -> None:
    """Make ``init_process_group("pccl")``, ``"cpu:pccl"`` and ``new_group(backend="pccl")`` known to torch.

    The installed entry point does it at ``import torch``. Nothing is compiled before a group is made.
    """
    from torch.distributed.distributed_c10d import Backend

    if "pccl" not in Backend.backend_list:
        Backend.register_backend("pccl", _create, extended_api=True, devices=["cpu", "cuda"])
        watched_barrier.install()
        default_timeout.install()
        coalescing.install()


def _create(options: Any, backend_options: Any = None) -> Any:
    from axonn_plugins.pccl.backend import create

    return create(options, backend_options)
