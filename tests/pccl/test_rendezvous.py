"""How members of a group find each other: one text for all, made by rank 0, whatever the members say."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from axonn_plugins.pccl import rendezvous
from axonn_plugins.pccl.answering import Answering
from axonn_plugins.pccl.build import BuildError
from axonn_plugins.pccl.builder import _WINDOW
from axonn_plugins.pccl.choice import Choice
from axonn_plugins.pccl.contest import candidates
from axonn_plugins.pccl.links import LinkError, Member
from axonn_recipes.bench_scale.collectives import Meeting, nodes, program
from axonn_recipes.bench_scale.collectives import member as far


def met(members: list[Member | None]) -> list[rendezvous.Roll]:
    """What each rank reads."""
    store = dist.HashStore()
    for rank, member in enumerate(members):
        rendezvous.tell(store, rank, member, f"node{rank // 2}", "alike" if rank else "other")
    return [rendezvous.roll_of(store, rank, range(len(members))) for rank in range(len(members))]


def test_every_rank_reads_where_all_are() -> None:
    members = [far(rank) for rank in range(5)]
    for roll in met(list(members)):
        assert roll.members is not None and list(roll.members) == members
        assert [roll.members[rank] for rank in range(5)] == members and list(roll.members[1:3]) == members[1:3]
        assert roll.identities == [member.identity for member in members]
        assert roll.nodes == ["node0", "node0", "node1", "node1", "node2"]
        assert roll.options == ["other", *["alike"] * 4]


def test_without_links_of_its_own_there_are_no_members() -> None:
    for roll in met([None, None]):
        assert roll.members is None and roll.identities == [] and roll.nodes == ["node0", "node0"]


def test_all_are_told_who_cannot_take_part() -> None:
    store = dist.HashStore()
    for rank in (0, 2):
        rendezvous.tell(store, rank, far(rank), "here", "alike")
    rendezvous.tell_failure(store, 1, BuildError("no compiler"))
    for rank in range(3):
        with pytest.raises(BuildError, match="rank 1 of the group cannot use pccl: no compiler"):
            rendezvous.roll_of(store, rank, range(3))
    rendezvous.tell_failure(store, 0, ValueError("no interface"))
    with pytest.raises(BuildError, match="rank 0 of the group cannot use pccl: no interface"):
        rendezvous.secret_of(store, 1, range(3))


def test_who_does_not_come_is_named() -> None:
    store, ranks = dist.HashStore(), [4, 5, 6, 7]
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(LinkError, match="pccl: rank 4 did not come to the start of a group"):
        rendezvous.secret_of(store, 1, ranks)
    for rank in (0, 2):
        rendezvous.tell(store, rank, far(rank), "here", "alike")
    for rank in (0, 2):
        with pytest.raises(LinkError, match="pccl: rank 5, 7 did not come to the start of a group"):
            rendezvous.roll_of(store, rank, ranks)
    for rank in (1, 3):
        rendezvous.tell(store, rank, far(rank), "here", "alike")
    with pytest.raises(LinkError, match="pccl: rank 4 did not come to the start of a group"):  # it has ended since
        rendezvous.roll_of(store, 2, ranks)


def test_a_store_whose_server_is_stopped_is_given_up() -> None:
    held, forever = dist.HashStore(), threading.Event()

    class Stopped(dist.PrefixStore):
        def get(self, key: str) -> bytes:
            forever.wait()
            return b""

    store = Answering(Stopped("a", held), 0.2)
    store.set("one", "1")
    assert store.add("two", 2) == 2 and held.get("a/one") == b"1"
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(
            LinkError, match="the store where the ranks of the group meet does not answer; who holds it, as"
        ):
            store.get("one")
        store.seconds = 100.0  # it is not asked again
    assert time.monotonic() < began + 50
    forever.set()


def test_a_store_that_has_gone_is_said_to_have() -> None:
    class Gone:
        def get(self, key: str) -> bytes:
            raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(LinkError, match="pccl: the store where the ranks of the group meet has gone"):
        rendezvous.secret_of(Answering(Gone(), 1.0), 1, range(2))  # type: ignore[arg-type]


def test_a_member_asks_for_as_much_however_many_there_are() -> None:
    asked = []
    for ranks in (16, 256):
        meeting = Meeting(ranks, 5)
        meeting()
        asked.append((meeting.store.written, meeting.store.asked, meeting.store.calls))
    assert asked[0] == asked[1] == (1, 2, 3)


def test_many_ranks_try_no_way_in_which_each_has_to_do_with_all() -> None:
    few, many = (
        {choice.algorithm for choice in candidates("all_gather", 2**26, nodes(ranks))} for ranks in (512, 1024)
    )
    assert few - many == {"ring", "hierarchical_direct_direct"} and "hierarchical_ring_direct" in many


def test_long_programs_wait_for_all_that_they_touch() -> None:
    """Beyond the window waits may be there twice over, and none is missing."""
    long = program("all_gather", Choice("ring"), 1024, 3)
    assert len(long.ops) > 1.9 * _WINDOW
    sent = {op.src[0].block: index for index, op in enumerate(long.ops) if op.kind == 0}
    come = {op.dst[0].block: index for index, op in enumerate(long.ops) if op.kind == 1}
    for block, index in sent.items():
        assert block == 3 or come[block] in long.ops[index].after
