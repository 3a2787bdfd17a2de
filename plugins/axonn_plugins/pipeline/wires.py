"""Point-to-point messages of bytes between the stages of a pipeline: torch.distributed's, and MPI's where mpi4py is."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import perf_counter, sleep
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_tp.grid.timeouts import world_timeout

CHANNELS = 4
"""Inputs and gradients, each with what its first message had no room for."""
AHEAD = 2
"""Receives that are posted at a time from one neighbour, beside the message that is worked on."""
_FIRST_TAG = 7300
_EAGER_QUESTIONS, _LONGEST_PAUSE = 200, 2e-4


class Pending(Protocol):
    """A message on its way."""

    def done(self) -> bool:
        """True if `wait` would return at once; only on a wire that `polls`."""

    def wait(self) -> None:
        """Return when the buffer is free, or full.

        Raises:
            RuntimeError: the other stage is gone, or the time is up.
        """


class Wire(Protocol):
    """Links to all stages of one pipeline.

    Attributes:
        polls: whether `Pending.done` is known without waiting; else a thread waits at each link.
        ahead: receives from a neighbour that may be posted before the stage has nothing else to do; 0 where a receive occupies the
            accelerator, as whatever waits for all that runs there, as loading a kernel may, would wait for the neighbour, too.
        device: where buffers are.
        timeout: seconds that a message may take.
    """

    polls: bool
    ahead: int
    device: torch.device
    timeout: float

    def send(self, buffer: Tensor, stage: int, channel: int) -> Pending:
        """Start to send bytes to a stage; messages of one channel arrive in their order."""

    def receive(self, buffer: Tensor, stage: int, channel: int) -> Pending:
        """Start to receive as many bytes as the buffer has."""


class _Work:
    def __init__(self, work: Any, timeout: timedelta) -> None:
        self.work, self.timeout = work, timeout

    def done(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        # NCCL lets the current stream wait, and knows no limit of its own here.
        if not self.work.wait(self.timeout):
            raise RuntimeError("the message did not arrive")


class TorchWire:
    """Messages of `torch.distributed`: gloo, PCCL or NCCL, whichever the world has for the device.

    On a CPU a pipeline has one group, whose links have tags. NCCL knows none, and runs what is posted to a group one after
    another in that order, to whichever rank: a receive that waits would hold back the send that lets it come. So there every
    link has two-rank groups, one a channel, in which a rank only ever sends or only ever receives.

    Args:
        pipelines: global ranks of every pipeline of the world, by stage; the same on all ranks, which make groups here.
        device: where activations are.
        timeout: seconds that a message may take; by default the world's.

    Attributes:
        ranks: of this rank's pipeline, by stage.
    """

    def __init__(self, pipelines: Sequence[Sequence[int]], device: torch.device, timeout: float | None = None) -> None:
        self.device, self.timeout = device, world_timeout(device).total_seconds() if timeout is None else timeout
        self._allowed = timedelta(seconds=self.timeout)
        self.polls = device.type != "cpu"
        self.ahead = 0 if self.polls else AHEAD
        self.ranks = next(list(ranks) for ranks in pipelines if dist.get_rank() in ranks)
        self._own = self.ranks.index(dist.get_rank())
        self._groups: dict[tuple[int, int], tuple[Any, list[int]]] = {}
        for ranks in pipelines:
            for place, members in self._divided(ranks).items():
                made = dist.new_group(members, timeout=self._allowed)
                if dist.get_rank() in members:
                    self._groups[place] = made, sorted(members)

    def _divided(self, ranks: Sequence[int]) -> dict[tuple[int, int], list[int]]:
        """The ranks of each group of a pipeline, by the first stage of its link and its channel."""
        if not self.polls:
            return {(0, 0): list(ranks)}
        links = range(len(ranks) - 1)
        return {(link, channel): list(ranks[link : link + 2]) for link in links for channel in range(CHANNELS)}

    def connect(self) -> None:
        """Send a byte over every link, in one order; all ranks call it, once.

        NCCL's first message over a link holds up either side until the other has posted its own, which in a batch it may do only
        after what the first side would have done next.

        Raises:
            RuntimeError: a neighbour is gone.
        """
        for link, channel in sorted(self._groups) if self.polls else ():
            byte, forth = torch.zeros(1, dtype=torch.uint8, device=self.device), channel < CHANNELS // 2
            other = link + 1 if self._own == link else link
            (self.send if forth == (self._own == link) else self.receive)(byte, other, channel).wait()

    def _link(self, stage: int, channel: int) -> tuple[Any, int, int]:
        """A group, the other stage's rank in it, and a tag."""
        group, members = self._groups[(min(stage, self._own), channel) if self.polls else (0, 0)]
        return group, members.index(self.ranks[stage]), 0 if self.polls else _FIRST_TAG + channel

    def send(self, buffer: Tensor, stage: int, channel: int) -> Pending:  # noqa: D102
        group, rank, tag = self._link(stage, channel)
        return _Work(group.send([buffer], rank, tag), self._allowed)

    def receive(self, buffer: Tensor, stage: int, channel: int) -> Pending:  # noqa: D102
        group, rank, tag = self._link(stage, channel)
        return _Work(group.recv([buffer], rank, tag), self._allowed)


def mpi_found() -> bool:
    """True if mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


class MpiWire:
    """MPI_Isend and MPI_Irecv, as in 3.2.1; the program was started by mpirun.

    Args:
        ranks: of the stages, in `communicator`.
        device: where activations are; an accelerator's need an MPI that knows it.
        timeout: seconds that a message may take.
        communicator: by default COMM_WORLD.
    """

    polls, ahead = True, AHEAD

    def __init__(
        self, ranks: Sequence[int], device: torch.device, timeout: float = 1800.0, communicator: Any = None
    ) -> None:
        from mpi4py import MPI

        self.ranks, self.device, self.timeout = list(ranks), device, timeout
        self._communicator = MPI.COMM_WORLD if communicator is None else communicator
        self._byte, self._of = MPI.BYTE, MPI.buffer.fromaddress

    def _view(self, buffer: Tensor) -> list[Any]:
        return [self._of(buffer.data_ptr(), buffer.numel()), self._byte]

    def send(self, buffer: Tensor, stage: int, channel: int) -> Pending:  # noqa: D102
        if buffer.is_cuda:
            torch.cuda.current_stream().synchronize()
        request = self._communicator.Isend(self._view(buffer), self.ranks[stage], _FIRST_TAG + channel)
        return _Request(request, buffer, self.timeout)

    def receive(self, buffer: Tensor, stage: int, channel: int) -> Pending:  # noqa: D102
        request = self._communicator.Irecv(self._view(buffer), self.ranks[stage], _FIRST_TAG + channel)
        return _Request(request, buffer, self.timeout)


class _Request:
    def __init__(self, request: Any, buffer: Tensor, timeout: float) -> None:
        self.request, self.buffer, self.timeout = request, buffer, timeout

    def done(self) -> bool:
        return self.request.Test()

    def wait(self) -> None:
        wait_for(self.done, self.timeout)


def wait_for(done: Callable[[], bool], timeout: float, on_idle: Callable[[], None] | None = None) -> None:
    """Ask until it is so: first without a pause, then less and less often.

    Raises:
        RuntimeError: not within `timeout` seconds.
    """
    start = idle = perf_counter()
    asked = 0
    while not done():
        asked += 1
        if asked < _EAGER_QUESTIONS:
            continue
        sleep(min(1e-6 * asked, _LONGEST_PAUSE))
        now = perf_counter()
        if now - start > timeout:
            raise RuntimeError(f"timed out: nothing in {timeout:g} s")
        if on_idle is not None and now - idle > 1.0:
            idle = now
            on_idle()
