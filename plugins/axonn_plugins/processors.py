"""Processors that this process may run on, and each rank's share of them."""

from __future__ import annotations

import os


def usable() -> int:
    """The number of processors that this process may run on: all of the machine, or those that taskset or SLURM leave it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_among(ranks: int) -> None:
    """Let torch's operators use as many threads as there are processors for each of `ranks` on this machine, at least one."""
    import torch

    torch.set_num_threads(max(1, usable() // ranks))
