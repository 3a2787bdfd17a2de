"""Every schedule over groups that do what is posted in its order, as NCCL's: no deadlock, and the right messages."""

from __future__ import annotations

import random
import time
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axonn_plugins.pipeline.links import Arrival, StageLost
from axonn_plugins.pipeline.packing import Message
from axonn_plugins.pipeline.schedule import POLICIES, Policy, Stage, automatic_limit
from axonn_plugins.pipeline.transport import Transport
from axonn_plugins.pipeline.wires import AHEAD, CHANNELS, TorchWire
from tests.matrix import thorough
from tests.pipeline.ordered import World

CPU = torch.device("cpu")
LONG, SHORT = 60.0, 1.5
"""Seconds without a message after which something is wrong, and where that is expected."""
MICROBATCHES, BATCHES = 9, 2
STAGES = [2, thorough(3), 4, thorough(5)]


class Ahead(TorchWire):
    """Receives are posted before a stage has nothing else to do, as where they do not occupy the device."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.ahead = AHEAD


class GroupAChannel(Ahead):
    """One group a channel for all stages, in which a stage's sends wait for its receives."""

    def _divided(self, ranks: Any) -> dict[tuple[int, int], list[int]]:
        return {(0, channel): list(ranks) for channel in range(CHANNELS)}

    def _link(self, stage: int, channel: int) -> tuple[Any, int, int]:
        group, members = self._groups[0, channel]
        return group, members.index(self.ranks[stage]), 0


def content(batch: int, microbatch: int, sender: int) -> torch.Tensor:
    """A stage's message, of a size that changes, so that some do not fit the room that is there."""
    generator = torch.Generator().manual_seed(100 * batch + 10 * microbatch + sender)
    return torch.rand(random.Random(microbatch).choice([1, 7, 300, 900]), generator=generator)


def loading(kind: str, size: int) -> None:
    """A pass begins on tensors of a size."""


def train(
    wire: TorchWire, stage: int, stages: int, policy: Policy, limit: int, backward: bool, apart: bool = True
) -> int:
    """Passes of a stage in `BATCHES` batches, of which the messages are checked; returns how many there were."""
    transport, draw, passes = Transport(wire, stage, stages), random.Random(stage), 0
    seen: set[int] = set()

    def is_new(microbatch: int, batch: int) -> bool:
        known = len(seen)
        seen.add(len(content(batch, microbatch, stage)))
        return len(seen) > known

    for batch in range(BATCHES):
        most = transport.limit(limit) if backward else limit
        asks = apart and backward and transport.occupies and stage == 0 and policy == "message_driven"
        asked = partial(is_new, batch=batch) if asks else None
        machine = Stage(policy, stage, stages, MICROBATCHES, most, backward=backward, apart=asked)
        alone: dict[int, bool] = {}

        def take(
            arrival: Arrival | None, batch: int = batch, machine: Stage = machine, alone: dict[int, bool] = alone
        ) -> bool:
            if arrival is None:
                return False
            (x,), number = arrival.message.tensors, arrival.message.microbatch
            sender = stage - 1 if arrival.is_input else stage + 1
            assert x is not None and torch.equal(x, content(batch, number, sender))
            alone[number] = arrival.message.alone
            (machine.input_arrived if arrival.is_input else machine.gradient_arrived)(number)
            return True

        transport.begin(MICROBATCHES, machine.limit, backward=backward)
        while not machine.finished:
            while backward and take(transport.receive(False)):
                pass
            action = machine.next()
            if action is None:
                take(transport.receive(True))
                continue
            values = content(batch, action.microbatch, stage)
            loading(action.kind, len(values))
            time.sleep(draw.choice([0, 0, 0.001]))
            passes += 1
            message = Message(action.microbatch, (values,), True, (True,), alone.get(action.microbatch, action.alone))
            if action.kind == "forward" and not machine.is_last:
                transport.send_input(message)
            elif action.kind == "backward" and not machine.is_first:
                transport.send_gradient(message)
        transport.end()
    return passes


def pipelines_of(stages: int, replicas: int) -> list[list[int]]:
    """As DeepSpeed numbers them: neighbours are replicas."""
    return [[stage * replicas + replica for stage in range(stages)] for replica in range(replicas)]


def run(
    monkeypatch: pytest.MonkeyPatch,
    world: World,
    stages: int,
    policy: Policy,
    replicas: int = 1,
    limit: int | None = None,
    backward: bool = True,
    kind: type[TorchWire] = TorchWire,
    connect: bool = True,
    apart: bool = True,
) -> list[Any]:
    """Outcome of each rank: passes, or an error."""
    pipelines = pipelines_of(stages, replicas)
    monkeypatch.setattr(dist, "new_group", world.new_group)
    monkeypatch.setattr(dist, "get_rank", world.get_rank)

    def of_rank(rank: int) -> int:
        wire = kind(pipelines, torch.device("cuda"), world.timeout)
        assert wire.polls
        wire.device = CPU  # where buffers are
        if connect:
            wire.connect()
        most = automatic_limit(policy, stages, MICROBATCHES) if limit is None else limit
        return train(wire, rank // replicas, stages, policy, most, backward, apart)

    return world.run(stages * replicas, of_rank)


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("stages", STAGES)
def test_no_schedule_deadlocks(monkeypatch: pytest.MonkeyPatch, stages: int, buffered: bool) -> None:
    for policy, limit in product(POLICIES, (None, 1, stages)):
        found = run(monkeypatch, World(buffered, True, LONG), stages, policy, limit=limit)
        assert found == [2 * BATCHES * MICROBATCHES] * stages, (policy, limit, found)
    found = run(monkeypatch, World(buffered, True, LONG), stages, "message_driven", backward=False)
    assert found == [BATCHES * MICROBATCHES] * stages, found


def test_groups_are_of_the_links(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(False, True, LONG)
    found = run(monkeypatch, world, 3, "message_driven", replicas=2)
    assert found == [2 * BATCHES * MICROBATCHES] * 6, found
    links = [[0, 2], [2, 4], [1, 3], [3, 5]]
    assert [group.ranks for group in world.groups] == [link for link in links for _ in range(CHANNELS)]
    for group in world.groups:
        sends = {rank: sends for rank, _, sends in group.met}
        assert sorted(sends.values()) == [False, True] and len(group.met) == 2, "a rank sends, or receives"


@pytest.mark.parametrize(("stages", "policy"), [(3, "message_driven"), (4, "message_driven"), (4, "1f1b")])
def test_one_group_for_all_stages_deadlocks(monkeypatch: pytest.MonkeyPatch, stages: int, policy: Policy) -> None:
    """That these groups tell: even where sends are buffered, and no first message holds anybody up."""
    found = run(monkeypatch, World(True, False, SHORT), stages, policy, kind=GroupAChannel, limit=stages, connect=False)
    assert any(isinstance(said, StageLost) and "timed out" in str(said) for said in found), found


def test_first_messages_deadlock_unless_links_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, World(True, True, SHORT), 2, "message_driven", kind=Ahead, connect=False)
    assert all(isinstance(said, StageLost) and "timed out" in str(said) for said in found), found


def _loaded(monkeypatch: pytest.MonkeyPatch, world: World, by_size: bool = False) -> None:
    """The first pass of each kind, and size, waits for all that a stage has posted: CUDA may, where it loads a kernel for the first time."""
    seen: set[tuple[int, str, int]] = set()

    def load(kind: str, size: int) -> None:
        if (place := (world.get_rank(), kind, size if by_size else 0)) not in seen:
            seen.add(place)
            world.settle()

    monkeypatch.setattr("tests.pipeline.test_ordered.loading", load)


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("stages", STAGES)
def test_kernels_that_are_loaded_wait_for_no_receive(
    monkeypatch: pytest.MonkeyPatch, stages: int, buffered: bool
) -> None:
    for policy, limit in product(POLICIES, (None, 1, stages)):
        _loaded(monkeypatch, world := World(buffered, True, LONG))
        found = run(monkeypatch, world, stages, policy, limit=limit)
        assert found == [2 * BATCHES * MICROBATCHES] * stages, (policy, limit, found)


def test_they_would_for_receives_that_are_posted_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    _loaded(monkeypatch, world := World(True, True, SHORT))
    found = run(monkeypatch, world, 2, "message_driven", kind=Ahead)
    assert any("timed out" in str(said) for said in found), found


def _growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of the second batch are of other sizes than those of the first, and the last of them of the first's of the batch."""

    known = content

    def grown(batch: int, microbatch: int, sender: int) -> torch.Tensor:
        return torch.cat([known(batch, microbatch, sender), torch.zeros(batch * (100 * (microbatch % 5) + 17))])

    monkeypatch.setattr("tests.pipeline.test_ordered.content", grown)


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("stages", STAGES)
def test_kernels_for_new_shapes_wait_for_nothing(monkeypatch: pytest.MonkeyPatch, stages: int, buffered: bool) -> None:
    _growing(monkeypatch)
    for limit in (None, 1, stages):
        _loaded(monkeypatch, world := World(buffered, True, LONG), by_size=True)
        found = run(monkeypatch, world, stages, "message_driven", limit=limit)
        assert found == [2 * BATCHES * MICROBATCHES] * stages, (limit, found)


def test_they_would_where_nothing_is_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 0 computes four microbatches before it takes in a gradient, and stage 1 has sent one when it begins the second."""
    _growing(monkeypatch)
    _loaded(monkeypatch, world := World(False, True, SHORT), by_size=True)
    found = run(monkeypatch, world, 2, "message_driven", limit=4, apart=False)
    assert any("timed out" in str(said) for said in found), found
