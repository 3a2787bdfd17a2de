"""Starting ranks: who keeps the store stays until all have reported, and the rank that failed by itself is named."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

from axonn_plugins.cluster.launch import RankFailed, launch
from axonn_plugins.config import ConfigError

starts = import_module("axonn_plugins.cluster.launch")  # the package has a function of that name


def _sum_in_a_later_group() -> float:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank > 0:
        time.sleep(1)
    group = dist.new_group([1, 2])
    total = torch.tensor([float(rank)])
    if rank > 0:
        dist.all_reduce(total, group=group)
    return total.item()


def test_rank_0_serves_the_store_until_all_have_reported() -> None:
    assert launch(_sum_in_a_later_group, 3) == [0, 3, 3]


def test_ranks_for_which_there_is_no_room_are_not_started() -> None:
    with pytest.raises(
        ConfigError, match=r"^99999999999 ranks are more than this machine has files and memory for, \d+; start fewer$"
    ):
        launch(_sum_in_a_later_group, 99_999_999_999)


class _Told(Exception):
    """An exception that pickle can write and not read, as those of web libraries are."""

    def __init__(self, text: str, *, answer: int) -> None:
        super().__init__(text)
        self.answer = answer


def _raises_or_returns(raises: bool) -> object:
    if raises:
        raise _Told("no such model", answer=404)
    return lambda: 3


@pytest.mark.parametrize(
    ("raises", "said"), [(True, "_Told: no such model"), (False, "what it returned cannot be sent")]
)
def test_what_cannot_be_sent_to_who_started_the_ranks_is_told_in_words(raises: bool, said: str) -> None:
    with pytest.raises(RankFailed, match=said) as failed:
        launch(_raises_or_returns, 1, raises)
    assert failed.value.error is None


def _fails(dies_after: float) -> None:
    rank = int(os.environ["RANK"])
    if rank == 0:
        time.sleep(dies_after)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1 if rank == 1 else 60)  # only then is rank 1 the first on a busy machine, too
    raise RuntimeError(f"rank {rank} lost its connection")


def test_a_killed_rank_is_named_and_not_those_that_lost_their_connection_to_it() -> None:
    with pytest.raises(RankFailed, match="rank 0 failed:\nit was ended by SIGKILL"):
        launch(_fails, 4, 0.5)


def test_a_killed_rank_is_named_that_takes_its_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "_ending", lambda pid: True)
    with pytest.raises(RankFailed, match="rank 0 failed:\nit was ended by SIGKILL"):
        launch(_fails, 4, 2.0)


def test_a_process_that_was_killed_is_ending() -> None:
    child = subprocess.Popen(["sleep", "100"])
    assert not starts._ending(child.pid)
    child.kill()
    while not starts._ending(child.pid):
        time.sleep(0.01)
    child.wait()
    assert not starts._ending(child.pid)


def test_the_first_lost_connection_is_named_where_no_rank_failed_by_itself() -> None:
    with pytest.raises(RankFailed, match="rank 1 lost its connection"):
        launch(_fails, 4, 60.0)
