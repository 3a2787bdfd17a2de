"""Train a side and keep what is compared: losses, validations, seconds, bytes of state and on the wire."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

import samo
from axonn_plugins import processors
from axonn_plugins.observe.ledger import Ledger
from axonn_plugins.observe.metrics import MetricsLogger
from axonn_recipes.pruned.plan import DTYPES, Plan
from axonn_recipes.pruned.sides import Dense, Pruned, Side


class Problem(Protocol):
    """The task that is learned."""

    @property
    def metric(self) -> str:
        """The quantity that a validation measures, such as "perplexity"."""

    @property
    def title(self) -> str:
        """The model in words."""

    def build(self) -> nn.Module:
        """The model, from torch's random numbers."""

    def batches(self, step: int, rank: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
        """A rank's share of a step's batch, in microbatches of one size: the same whole batch for any number of ranks."""

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a microbatch."""

    def held_out(self, rank: int, ranks: int) -> Iterable[tuple[Tensor, Tensor]]:
        """A rank's share of what is validated with."""

    def score(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, int]:
        """Sum and number of what is averaged over all that is held out."""

    def figure(self, mean: float) -> float:
        """The metric, from the average."""


@dataclass
class Outcome:
    """The results of a side; the same on all ranks but for `seconds` and `state_bytes`.

    Attributes:
        losses: mean over the batch, by step.
        validation: step and metric.
        seconds: of each step.
        state_bytes: of a rank, at the end.
        reduced_bytes: that a rank handed to all-reduces in the first step and in the last.
        parameters: of the model.
        kept: those that are not pruned at the end.
        pruned_at: after which step weights were pruned.
        ticket: whether the search for a ticket had ended by then.
        distances: of the search; see `samo.EarlyBird`.
        table: sparsity by layer.
    """

    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    state_bytes: int = 0
    reduced_bytes: tuple[int, int] = (0, 0)
    parameters: int = 0
    kept: int = 0
    pruned_at: int | None = None
    ticket: bool = False
    distances: list[list[float]] = field(default_factory=list)
    table: str = ""


def train(problem: Problem, plan: Plan, prune: bool, folder: Path) -> Outcome:
    """Train a side on one rank, started by `axonn_plugins.cluster.launch.launch`.

    Args:
        problem: what is learned.
        plan: how.
        prune: the pruned side; else the dense one.
        folder: for its metrics.
    """
    if plan.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    processors.share_among(plan.ranks)
    # Newer torch has another name for DistributedDataParallel's broadcast_buffers, older torch has not.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*broadcast_buffers")
    dist.init_process_group("nccl" if plan.device == "cuda" else "gloo")
    return _Run(problem, plan, prune).train(folder)


def reduced_bytes(ledger: Ledger) -> int:
    """Bytes of the tensors that this rank handed to all-reduces; none where it is alone."""
    entries = [entry for entry in ledger.entries if entry.collective.op == "all_reduce"]
    return sum(entry.collective.elements * entry.itemsize for entry in entries)


class _Run:
    def __init__(self, problem: Problem, plan: Plan, prune: bool) -> None:
        self.problem, self.plan, self.rank = problem, plan, dist.get_rank()
        torch.manual_seed(plan.seed)
        self.plain = problem.build().to(plan.device, DTYPES[plan.dtype])
        self.side: Side = Pruned(self.plain, plan) if prune else Dense(self.plain, plan)
        self.search = None
        if prune and plan.pruner == "early_bird":
            self.search = samo.EarlyBird(self.plain, plan.sparsity, plan.window, plan.epsilon, plan.scope)
        parameters = sum(parameter.numel() for parameter in self.plain.parameters())
        self.outcome = Outcome(parameters=parameters, kept=parameters)

    def train(self, folder: Path) -> Outcome:
        plan, outcome = self.plan, self.outcome
        metrics = MetricsLogger(folder) if self.rank == 0 else None
        reduced = []
        if isinstance(self.side, Pruned) and plan.last_dense_step == 0:
            self._prune(0)
        for step in range(1, plan.steps + 1):
            watched = step in (1, plan.steps)
            ledger = Ledger()
            with ledger if watched else nullcontext():
                began = time.perf_counter()
                loss = self._step(step)
                outcome.seconds.append(time.perf_counter() - began)
            if watched:
                reduced.append(reduced_bytes(ledger))
            outcome.losses.append(self._mean(loss))
            self._look(step)
            lr = plan.lr_at(step, outcome.pruned_at is not None)
            if metrics is not None:
                metrics.log(step, loss=outcome.losses[-1], lr=lr, seconds=outcome.seconds[-1])
            if step % plan.validate_every == 0 or step == plan.steps:
                outcome.validation.append((step, self._validate()))
                if metrics is not None:
                    self._say(step, metrics)
        if metrics is not None:
            metrics.finish()
        outcome.state_bytes, outcome.reduced_bytes = self.side.state_bytes(), (reduced[0], reduced[-1])
        outcome.distances = self.search.distances if self.search is not None else []
        return outcome

    def _step(self, step: int) -> Tensor:
        batches = self.problem.batches(step, self.rank, self.plan.ranks)
        total = torch.zeros((), device=self.plan.device)
        for number, (inputs, targets) in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else self.side.no_sync():
                loss = self.problem.loss(
                    self.side.model, inputs.to(self.plan.device), targets.to(self.plan.device)
                ) / len(batches)
                loss.backward()
            total += loss.detach()
        self.side.step(self.plan.lr_at(step, self.outcome.pruned_at is not None))
        return total

    def _look(self, step: int) -> None:
        """Prune if it is time."""
        if not isinstance(self.side, Pruned) or self.outcome.pruned_at is not None:
            return
        if self.search is not None and step % self.plan.every == 0 and self.search.observe():
            self.outcome.ticket = True
        if self.outcome.ticket or step == self.plan.last_dense_step:
            self._prune(step)

    def _prune(self, step: int) -> None:
        assert isinstance(self.side, Pruned)
        masks = self.search.masks if self.search is not None else None
        if masks is None:
            masks = samo.magnitude(self.plain, self.plan.sparsity, self.plan.scope)
        self.side.prune(masks)
        self.outcome.pruned_at, self.outcome.table = step, samo.sparsity_table(masks, self.plain)
        self.outcome.kept -= sum(int((~mask).sum()) for mask in masks.values())

    def _mean(self, value: Tensor) -> float:
        total = value.double()
        dist.all_reduce(total)
        return total.item() / self.plan.ranks

    @torch.no_grad()
    def _validate(self) -> float:
        """The metric over all that is held out. Running statistics of norms become those of all ranks first."""
        for buffer in self.plain.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer /= self.plan.ranks
        self.plain.eval()
        found = [
            self.problem.score(self.plain, inputs.to(self.plan.device), targets.to(self.plan.device))
            for inputs, targets in self.problem.held_out(self.rank, self.plan.ranks)
        ]
        self.plain.train()
        sums = torch.tensor([[float(x) for x in pair] for pair in found] or [[0.0, 0.0]], dtype=torch.float64).sum(0)
        sums = sums.to(self.plan.device)
        dist.all_reduce(sums)
        total, count = sums.tolist()
        return self.problem.figure(total / count)

    def _say(self, step: int, metrics: MetricsLogger) -> None:
        outcome, name = self.outcome, "pruned" if isinstance(self.side, Pruned) else "dense"
        metrics.log(step, **{f"val_{self.problem.metric}": outcome.validation[-1][1]})
        where = f", pruned after step {outcome.pruned_at}" if outcome.pruned_at is not None else ""
        print(
            f"{name}  step {step:>{len(str(self.plan.steps))}}/{self.plan.steps}  loss {outcome.losses[-1]:7.4f}  "
            f"validation {self.problem.metric} {outcome.validation[-1][1]:.4f}{where}",
            flush=True,
        )
