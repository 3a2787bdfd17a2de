"""How much memory a call takes."""

from collections.abc import Callable
from typing import Any

import torch


def most_allocated(function: Callable[[], Any]) -> int:
    """The most bytes at one time that a call allocated, above what there was."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most
