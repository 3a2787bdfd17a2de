"""Ranks that end, stop, leave a group or call something else: every other rank is told at once, by name."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from axonn_plugins.cluster.launch import launch
from axonn_plugins.pccl.build import load
from tests.matrix import thorough
from tests.pccl import kills
from tests.pccl.stress import join


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Before ranks are forked, whose time is limited."""
    load()


@pytest.mark.parametrize("end", ["killed", "stopped", "leaves"])
def test_who_ends_is_named_by_all_others_who_go_on_without_it(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "TIMEOUT", 4.0)
    wrong, _ = kills.round_of(random.Random(f"{end} 1"), end, 4)
    assert not wrong, "\n".join(wrong)


def _said(call: Callable[..., object], *arguments: object, **options: object) -> tuple[str, float]:
    began = time.monotonic()
    try:
        call(*arguments, **options)
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "no error", time.monotonic() - began


def _halves(size: int) -> list[torch.Tensor]:
    return [torch.zeros(2) for _ in range(size)]


def _unlike() -> dict[str, tuple[str, float]]:
    """Error that each rank is told in groups of their own."""
    rank, size = join(timeout=30)
    found = {}
    group = dist.new_group()
    assert group is not None
    dist.all_reduce(torch.ones(3), group=group)
    dist.all_to_all_single(torch.empty(size), torch.ones(size), group=group)
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group(group)
    else:
        time.sleep(0.3)
        found["left, ours"] = _said(dist.all_reduce, torch.ones(3), group=group)
    dist.barrier()
    group = dist.new_group()
    assert group is not None
    if rank == 1:  # which has no links of the group
        dist.destroy_process_group(group)
    else:
        found["left, elsewhere"] = _said(dist.all_to_all_single, torch.empty(size), torch.ones(size), group=group)
    dist.barrier()
    group = dist.new_group()
    if rank == 1:
        found["kinds"] = _said(dist.gather, torch.zeros(2), group=group, group_dst=0)
        found["kinds"] = _said(dist.gather, torch.zeros(2), _halves(size), group=group, group_dst=1)
    else:
        found["kinds"] = _said(
            dist.gather, torch.zeros(2), _halves(size) if rank == 0 else None, group=group, group_dst=0
        )
        found["kinds"] = _said(dist.all_to_all_single, torch.zeros(size), torch.zeros(size), group=group)
    dist.barrier()
    group = dist.new_group()
    if rank == 1:
        found["ours and elsewhere"] = _said(dist.all_to_all_single, torch.zeros(size), torch.zeros(size), group=group)
    else:
        found["ours and elsewhere"] = _said(dist.all_reduce, torch.zeros(7), group=group)
    dist.barrier()
    group = dist.new_group()
    # A rank that has raised comes no more: others that wait for it alone are told, too.
    if rank == 0:
        found["raised"] = _said(dist.all_reduce, torch.zeros(7), group=group)
    elif rank == 1:
        found["raised"] = _said(dist.all_reduce, torch.zeros(8), group=group)
    else:
        found["raised"] = _said(dist.recv, torch.zeros(7), group=group, group_src=0)
    dist.barrier()
    return found


def test_calls_that_cannot_be_done_are_named_at_once_wherever_they_went() -> None:
    ranks = launch(_unlike, 3)
    for rank, found in enumerate(ranks):
        for case, (text, seconds) in found.items():
            assert seconds < 10 and text.startswith("pccl: rank"), (rank, case, seconds, text)
        if rank != 1:
            assert (
                "call 3 of its group, cannot be done: rank 1 has left the group after call 2" in found["left, ours"][0]
            )
            assert "rank 1 has left the group after call 0" in found["left, elsewhere"][0]
        text = found["kinds"][0]
        assert "gather of 2 float32" in text and "all_to_all of 3 float32" in text and "call 2 of its group" in text
        text = found["ours and elsewhere"][0]
        assert "all_reduce of 7 float32 (sum)" in text and "all_to_all of 3 float32" in text
        text = found["raised"][0]
        assert "all_reduce of 7 float32 (sum)" in text and "all_reduce of 8 float32 (sum)" in text


def _waits_elsewhere(call: str) -> str:
    """Rank 0 waits for rank 1, which waits in another group for rank 2, which comes too late; what rank 0 is told."""
    rank, _ = join(timeout=60)
    near, far = (dist.new_group([first, first + 1], timeout=timedelta(seconds=34)) for first in (0, 1))
    if rank < 2:
        c10d._set_pg_timeout(timedelta(seconds=4), near)
    dist.barrier()
    text = ""
    if rank == 0:
        text, _ = _said(dist.all_reduce, torch.ones(3), group=near)
    else:
        time.sleep(7 * (rank - 1))
        arguments = [torch.ones(2)] if call == "all_reduce" else [torch.ones(2), torch.ones(2)]
        getattr(dist, call)(*arguments, group=far)
    dist.barrier()
    return text


@pytest.mark.parametrize("call", ["all_reduce", thorough("all_to_all_single")])
def test_who_holds_up_another_group_is_named(call: str) -> None:
    text = launch(_waits_elsewhere, 3, call)[0]
    assert text.startswith(
        "pccl: rank 0: all_reduce of 3 float32 (sum), call 1 of its group, was not done"
    ) and text.endswith(
        "it waits for rank 1: rank 1 has not made this call, its last is call 0; "
        "in another group, rank 2 has not made the call waited for there, its last is call 0"
    ), text


def _refused_everywhere() -> float:
    """A sum in place of a call that all ranks were refused, which one of them makes late."""
    rank, _ = join(timeout=30)
    flags = torch.tensor([True])
    with pytest.raises(ValueError, match="choose another operation"):
        dist.all_reduce(flags, dist.ReduceOp.AVG)
    if rank == 0:
        time.sleep(2.5)  # beyond when others ask, and are told of a refusal
    total = torch.ones((), dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def test_a_call_that_all_ranks_were_refused_holds_nobody_to_it() -> None:
    assert launch(_refused_everywhere, 2) == [2.0, 2.0]
