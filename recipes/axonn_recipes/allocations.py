"""Memory that a call takes."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def most_allocated(function: Callable[[], Any], device: str = "cpu") -> int:
    """The most bytes at one time that a call allocated on a device, above what there was.

    Args:
        function: to be called.
        device: "cpu" or "cuda".
    """
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_allocated() - before
    with (
        _silent(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        function()
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@contextmanager
def _silent() -> Iterator[None]:
    """Nothing reaches standard error: the profiler writes lines to it that no setting keeps off."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
