"""Processors that a process may run on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from axonn_plugins import processors


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("ranks", "threads"), [(1, 6), (2, 3), (4, 1), (7, 1)])
def test_ranks_share_the_processors_that_they_may_run_on(
    monkeypatch: pytest.MonkeyPatch, ranks: int, threads: int
) -> None:
    """Of a machine with more: what taskset or SLURM leaves counts."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(10, 16)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    processors.share_among(ranks)
    assert torch.get_num_threads() == threads


def test_where_the_system_does_not_tell_it_is_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert processors.usable() == 8
