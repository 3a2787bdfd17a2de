"""The work of each rank: some steps of one side, their seconds, bytes and losses."""

from __future__ import annotations

import os
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from axonn_plugins.observe.ledger import Ledger
from axonn_recipes.bench.rounds import over_ranks
from axonn_recipes.data import Corpus
from axonn_recipes.megatron_gpt.settings import Settings as Training

UNTIMED = 2
"""Steps before those that are timed; the second is the one whose collectives are counted."""


@dataclass
class Run:
    """The results of a run of one side; the same on every rank but for `sent`, which is this rank's.

    Attributes:
        losses: of all steps.
        seconds: of the timed steps, the slowest rank's.
        between: bytes a step between nodes, headers included, all nodes together.
        sent: bytes that this rank sends in a step under the ring algorithms, by axis.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    between: float = 0.0
    sent: dict[str, float] = field(default_factory=dict)


def measure(wire: str, side: Training) -> Run:
    """Run one side on this rank, its groups of this backend of torch.distributed."""
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    from axonn_recipes.megatron_gpt import train
    from axonn_recipes.megatron_gpt.model import build

    dist.init_process_group(wire)
    train.start(side)
    model, optimizer = build(side)
    steps = train.Steps(side, model, optimizer, noise(side))
    run = Run()
    for number in range(UNTIMED + side.steps):
        counted = Ledger(_axes(side)) if number == UNTIMED - 1 else None
        before = _sent_between()
        dist.barrier()
        began = time.perf_counter()
        with counted if counted is not None else nullcontext():
            loss, _ = steps.take(number)
        (seconds,) = over_ranks([time.perf_counter() - began], dist.ReduceOp.MAX)
        run.losses.append(loss)
        if number >= UNTIMED:
            run.seconds.append(seconds)
            run.between += over_ranks([_sent_between() - before], dist.ReduceOp.SUM)[0] / side.steps
        if counted is not None:
            run.sent = _named(counted)
    train.stop(side, model)
    dist.destroy_process_group()
    return run


def noise(side: Training) -> Corpus:
    """Random bytes, the same on every rank."""
    bytes_ = torch.randint(256, (2**16,), generator=torch.Generator().manual_seed(side.seed), dtype=torch.int64)
    return Corpus(bytes_, bytes_, 1, "noise")


def _axes(side: Training) -> dict[str, str]:
    """The axes of this side's process groups, by torch's name of each."""
    from megatron.core import parallel_state

    named: dict[str, str] = {
        parallel_state.get_tensor_model_parallel_group().group_name: "tensor",
        parallel_state.get_data_parallel_group().group_name: "data",
        parallel_state.get_data_parallel_group(with_context_parallel=True).group_name: "data",
    }
    if side.grid is not None:
        from axonn_plugins.hosts.megatron import process_groups

        named |= process_groups.mesh().axis_names()
        named |= {parallel_state.get_expert_data_parallel_group().group_name: "data"}
    return named


def _named(ledger: Ledger) -> dict[str, float]:
    """Bytes sent by axis; groups that have no name there, such as those of gradient norms, are together."""
    sent: dict[str, float] = {}
    for axis, (_, size) in ledger.by_axis().items():
        called = axis if axis in ledger.axes.values() else "other"
        sent[called] = sent.get(called, 0.0) + float(size)
    return sent


def _sent_between() -> float:
    """Bytes that this node has sent to others, as its first rank sees them; else 0."""
    if os.environ["LOCAL_RANK"] != "0":
        return 0.0
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(float(line.partition(":")[2].split()[8]) for line in lines if line.partition(":")[0].strip() != "lo")
