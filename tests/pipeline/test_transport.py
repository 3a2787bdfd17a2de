"""Messages between stages: over links in memory that lose time at random, over gloo, and over MPI."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.pccl.answering import Answering
from axonn_plugins.pipeline import watch as watch_module
from axonn_plugins.pipeline.clock import Clock
from axonn_plugins.pipeline.links import StageLost
from axonn_plugins.pipeline.packing import DTYPES, UNKNOWN, Message, pack, sizes, unpack, words_of
from axonn_plugins.pipeline.transport import Transport
from axonn_plugins.pipeline.watch import Watch
from axonn_plugins.pipeline.wires import AHEAD, TorchWire, mpi_found
from tests.distributed import run_ranks
from tests.pipeline.losing import stop_or_kill, survivors

CPU = torch.device("cpu")


def draw(generator: random.Random, microbatch: int) -> Message:
    """A message of any kind."""
    tensors: list[Tensor | None] = []
    for _ in range(generator.randint(0, 4)):
        shape = [generator.randint(0, 7) for _ in range(generator.randint(0, 4))]
        dtype = generator.choice(DTYPES[:12])
        tensor = (torch.rand(shape) * 100).to(dtype)
        if generator.random() < 0.3 and tensor.dim() > 1:
            tensor = tensor.transpose(0, 1)
        tensors.append(None if generator.random() < 0.1 else tensor)
    single = len(tensors) == 1 and generator.random() < 0.5
    return Message(microbatch, tuple(tensors), single, tuple(generator.random() < 0.5 for _ in tensors))


def same(a: Message, b: Message) -> bool:
    head = (a.microbatch, a.single, a.differentiable) == (b.microbatch, b.single, b.differentiable)
    return head and all(
        (x is None and y is None) or (x is not None and y is not None and x.dtype == y.dtype and torch.equal(x, y))
        for x, y in zip(a.tensors, b.tensors, strict=True)
    )


def test_packing() -> None:
    generator, used = random.Random(1), None
    for number in range(300):
        message = draw(generator, number)
        room = generator.choice([64, 500, 20_000])
        used = pack(message, room, 100, CPU, used if number % 2 else None)
        assert used.buffer.numel() >= room and sizes(words_of(used.buffer)) == (used.total, used.later)
        assert used.later >= max(100, used.total)
        assert same(unpack(used.buffer[: used.total], words_of(used.buffer)), message)


def test_a_buffer_is_used_again() -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    first = pack(Message(0, (x,), True, (True,)), 64, 0, CPU)
    again = pack(Message(7, (y,), True, (True,)), first.total, 0, CPU, first)
    assert again is first and same(unpack(again.buffer, words_of(again.buffer)), Message(7, (y,), True, (True,)))
    assert pack(Message(8, (y[:1],), True, (True,)), first.total, 0, CPU, first) is not first


def test_a_tensor_that_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="layout torch.sparse_coo cannot go from stage to stage"):
        pack(Message(0, (torch.eye(2).to_sparse(),), True, (True,)), 64, 0, CPU)


class _Mail:
    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.expected: list[tuple[Tensor, _Slow]] = []
        self.lock = threading.Lock()

    def match(self) -> None:
        while self.sent and self.expected:
            sent = self.sent.pop(0)
            buffer, pending = self.expected.pop(0)
            assert sent.numel() == buffer.numel(), "both sides know the size"
            buffer.copy_(sent)
            pending.full.set()


class _Slow:
    """A message that takes its time."""

    def __init__(self, delay: float) -> None:
        self.full, self.ready = threading.Event(), time.perf_counter() + delay

    def done(self) -> bool:
        return self.full.is_set() and time.perf_counter() > self.ready

    def wait(self) -> None:
        self.full.wait(20)
        time.sleep(max(0.0, self.ready - time.perf_counter()))


class MemoryWire:
    """Links between threads of one process."""

    device, timeout = CPU, 20.0

    def __init__(self, mails: dict[tuple, _Mail], stage: int, polls: bool, ahead: int) -> None:
        self.mails, self.stage, self.polls, self.ahead, self.random = mails, stage, polls, ahead, random.Random(stage)

    def send(self, buffer: Tensor, stage: int, channel: int) -> Any:
        mail, pending = self.mails[self.stage, stage, channel], _Slow(0)
        pending.full.set()
        with mail.lock:
            mail.sent.append(buffer.clone())
            mail.match()
        return pending

    def receive(self, buffer: Tensor, stage: int, channel: int) -> Any:
        mail, pending = self.mails[stage, self.stage, channel], _Slow(self.random.choice([0, 0.001, 0.004]))
        with mail.lock:
            mail.expected.append((buffer, pending))
            mail.match()
        return pending


def echo(wire: Any, stage: int, messages: list[Message], batches: int) -> list[Message]:
    """Stage 0 sends and gets back what stage 1 heard; as many on the way at a time as may be."""
    transport, window, found = Transport(wire, stage, 2), 3, []
    for batch in range(batches):
        due = messages[batch::batches]
        transport.begin(len(due), window)
        sent = 0
        for _ in due:
            while stage == 0 and sent < len(due) and sent - len(found) % len(due) < window:
                transport.send_input(due[sent])
                sent += 1
            arrival = transport.receive(True)
            assert arrival is not None and arrival.is_input == (stage == 1)
            if stage == 1:
                transport.send_gradient(arrival.message)
            found.append(arrival.message)
        transport.end()
        assert transport.receive(False) is None
    return found


def test_when_a_message_was_sent_by_clocks_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ahead, found = 0, 7_000_000_000, 0.0
    monkeypatch.setattr("axonn_plugins.pipeline.clock.perf_counter_ns", lambda: now)
    here, there = Clock(), Clock()
    assert here.arrived(0, UNKNOWN) == float("inf")
    for number, (forth, back) in enumerate(((300, 900), (100, 500), (700, 100), (400, 800))):
        sent, answered = 10_000 * number, 10_000 * number + 5_000
        now = sent + forth + ahead
        there.arrived(sent, here.heard)
        now = answered + back
        found = here.arrived(answered + ahead, there.heard)
    assert found * 1e9 == pytest.approx(answered)


@pytest.mark.parametrize(("polls", "ahead"), [(False, AHEAD), (True, AHEAD), (True, 0)])
def test_any_messages_with_delays(polls: bool, ahead: int) -> None:
    generator = random.Random(5)
    messages = [draw(generator, number) for number in range(60)]
    mails = {(a, b, c): _Mail() for a, b in ((0, 1), (1, 0)) for c in range(4)}
    found: dict[int, list[Message]] = {}

    def run(stage: int) -> None:
        found[stage] = echo(MemoryWire(mails, stage, polls, ahead), stage, messages, 1)

    threads = [threading.Thread(target=run, args=(stage,)) for stage in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for stage in (0, 1):
        assert len(found[stage]) == 60
        assert all(same(a, b) for a, b in zip(found[stage], messages, strict=True))
    assert not any(mail.sent or mail.expected for mail in mails.values())


class _Gone:
    """A message of a neighbour that is lost: it has ended, as far as one can ask."""

    def __init__(self, gone: bool) -> None:
        self.gone = gone

    def done(self) -> bool:
        return self.gone

    def wait(self) -> None:
        raise RuntimeError("connection closed")


@pytest.mark.parametrize("lost", [0, 2])
def test_the_neighbour_whose_link_fails_is_named(lost: int) -> None:
    """Also where the other's is due as well, and when it is first asked."""
    wire = MemoryWire({}, 1, True, AHEAD)
    wire.receive = lambda buffer, stage, channel: _Gone(stage == lost)  # type: ignore[method-assign]
    transport = Transport(wire, 1, 3)
    transport.begin(1, 1)
    for wait in (False, True):
        with pytest.raises(StageLost, match="connection closed") as found:
            transport.receive(wait)
        assert found.value.stage == lost


def over_gloo() -> int:
    generator = random.Random(9)
    messages = [draw(generator, number) for number in range(40)]
    stage = dist.get_rank()
    found = echo(TorchWire([[0, 1]], CPU), stage, messages, 2)
    wanted = messages[::2] + messages[1::2]
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))
    return len(found)


def test_over_gloo() -> None:
    assert run_ranks(over_gloo, 2) == [40, 40]


def messages_are_one(ranks: int = 2) -> dict[str, int]:
    """Sends of a message whose shape is an earlier one's."""
    stage, wire = dist.get_rank(), TorchWire([[0, 1]], CPU)
    count, original = [0], wire.send

    def send(*arguments: Any) -> Any:
        count[0] += 1
        return original(*arguments)

    wire.send = send  # type: ignore[method-assign]
    echo(wire, stage, [Message(m, (torch.randn(30, 4),), True, (True,)) for m in range(10)], 1)
    return {"sends": count[0]}


def test_one_message_each_once_the_shape_is_known() -> None:
    assert [found["sends"] for found in run_ranks(messages_are_one, 2)] == [10 + AHEAD] * 2


def test_a_stage_does_not_wait_for_a_store_whose_server_is_stopped() -> None:
    class Stopped(dist.HashStore):
        held = threading.Event()

        def check(self, keys: list[str]) -> bool:
            return self.held.wait()

    watch = object.__new__(Watch)
    watch._store, watch.stage, watch._heard = Answering(Stopped(), 0.1, whose=""), 1, None
    for _ in range(2):
        with pytest.raises(
            StageLost, match="stage 1 cannot go on; the store where the ranks of the group meet does not"
        ):
            watch.waiting([0])
    Stopped.held.set()


def stage_dies(kind: str) -> str:
    """Stage 2 of 4 is killed, or hangs, while the others wait for it."""
    stage, ranks = dist.get_rank(), [0, 1, 2, 3]
    wire = TorchWire([ranks], CPU, timeout=6.0 if kind == "stop" else 60.0)
    watch = Watch("test", [ranks])
    transport = Transport(wire, stage, 4, watch.waiting)
    transport.begin(4, 4)
    dist.barrier()
    if stage == 2:
        stop_or_kill(kind)
    try:
        transport.receive(True)
    except StageLost as error:
        return str(watch.lost(error))
    return "heard something"


def one_computes() -> str:
    """Stage 2 of 4 is killed, and stage 3 comes to the collective when the others, and the store with them, have left."""
    answer = watch_module._ANSWER_SECONDS = 4.0  # type: ignore[misc]
    stage = dist.get_rank()
    watch = Watch("test", [[0, 1, 2, 3]])
    dist.barrier()
    if stage == 2:
        stop_or_kill("kill")
    if stage == 3:
        time.sleep(answer + 6)
    try:
        with watch.collectives():
            dist.all_reduce(torch.ones(1000))
    except StageLost as error:
        return str(watch.lost(error))
    return "went on"


def one_is_lost(how: str) -> str:
    return one_computes() if how == "one computes" else stage_dies(how)


def begins_again() -> str:
    """Stage 1 of 2 is killed between batches, and stage 0 begins the next one when it knows that the link is closed."""
    wire = TorchWire([[0, 1]], CPU)
    watch = Watch("test", [[0, 1]])
    transport = Transport(wire, dist.get_rank(), 2, watch.waiting)
    message = Message(0, (torch.ones(3),), True, (True,))
    transport.begin(1, 1)
    if dist.get_rank() == 1:
        transport.receive(True)
        transport.send_gradient(message)
        transport.end()
        stop_or_kill("kill")
    transport.send_input(message)
    transport.receive(True)
    time.sleep(1)
    try:
        transport.begin(1, 1)
        transport.receive(True)
    except StageLost as error:
        return str(watch.lost(error))
    return "heard something"


@pytest.mark.thorough
def test_a_stage_lost_between_batches_is_named() -> None:
    (said,) = survivors(begins_again, 2)
    assert said[0].startswith("stage 1 (rank 1) of the pipeline was lost; stage 0 waited for the gradient"), said


def test_a_lost_stage_is_named_by_all_and_one_that_computes_is_not_taken_for_lost() -> None:
    *died, computed = survivors(one_is_lost, 4, [("kill",), ("stop",), ("one computes",)])
    for said in (*died, computed):
        assert set(said) == {0, 1, 3}, said
    for said in died:
        for words in said.values():
            assert "stage 2 (rank 2) of the pipeline was lost" in words and "microbatch 0" in words, said
    words = computed.values()
    assert all(each.startswith("stage 2 (rank 2) of the pipeline was lost;") for each in words), computed


MPI = """
import random, torch
from mpi4py import MPI
from axonn_plugins.pipeline.wires import MpiWire
from tests.pipeline.test_transport import CPU, draw, echo, same
generator, stage = random.Random(9), MPI.COMM_WORLD.Get_rank()
torch.manual_seed(1)
messages = [draw(generator, number) for number in range(40)]
found = echo(MpiWire([0, 1], CPU), stage, messages, 2)
assert all(same(a, b) for a, b in zip(found, messages[::2] + messages[1::2], strict=True))
print("heard", len(found))
"""


def test_over_mpi() -> None:
    launcher = Path(sys.executable).parent / "mpiexec"
    found = str(launcher) if launcher.exists() else shutil.which("mpiexec")
    if not mpi_found() or found is None:
        pytest.skip("mpi4py or mpiexec is not installed")
    words = [found, "-n", "2", "--oversubscribe", "--allow-run-as-root", sys.executable, "-c", MPI]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout.split("\n").count("heard 40") == 2, done.stderr
