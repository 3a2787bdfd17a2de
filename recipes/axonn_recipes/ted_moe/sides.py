"""One script for both sides: a model with stock `deepspeed.moe.layer.MoE`, and `deepspeed.initialize`. The configuration differs."""

from __future__ import annotations

import os
import time
import warnings
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

import axonn_plugins
from axonn_plugins import processors
from axonn_plugins.observe.ledger import Ledger
from axonn_plugins.observe.metrics import MetricsLogger
from axonn_plugins.optim.flat import FlatOptimizer
from axonn_recipes.allocations import most_allocated
from axonn_recipes.data import Corpus
from axonn_recipes.models.moe_gpt import MoEBlock, MoEGPT
from axonn_recipes.samo_gpt.problem import Tokens
from axonn_recipes.ted_moe.settings import Settings

COUNTED_STEP, ALLOCATING_STEP = 2, 3
"""Steps at which collectives, and memory, are watched; their seconds do not count."""


@dataclass
class Outcome:
    """The results of a side, of rank 0 where ranks differ.

    Attributes:
        losses: mean over the batch, by step.
        validation: step and loss.
        seconds: of each step.
        exchanges: all-to-alls of a step, calls and bytes handed to them.
        sent: bytes that the rank sends in a step, all collectives together, by ring algorithms.
        parameters: held by the rank.
        state_bytes: of weights, float32 weights and moments.
        allocated: bytes that a step allocates at most, above the state: activations, stash, gradients, the optimizer's work.
        replicas: ranks that read different data.
    """

    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    exchanges: tuple[int, int] = (0, 0)
    sent: float = 0.0
    parameters: int = 0
    state_bytes: int = 0
    allocated: int = 0
    replicas: int = 1


def train(side: str, settings: Settings, corpus: Corpus | Tokens, folder: Path) -> Outcome:
    """Train a side on one rank, started by `axonn_plugins.cluster.launch.launch`.

    Args:
        side: "deepspeed" or "ted".
        settings: the run's.
        corpus: what is learned.
        folder: for its metrics.
    """
    import deepspeed

    axonn_plugins.activate()
    # On CPU DeepSpeed compiles a kernel for inference when it starts; training needs neither it nor a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It also calls collectives by names that newer torch wants changed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    processors.share_among(settings.ranks)
    config = settings.ds_config(side)
    rank = int(os.environ["RANK"])
    model = build(settings, rank // config.get("axonn", {}).get("ted", {}).get("tensor", 1))
    with redirect_stdout(None):  # every rank's "No existing process group found"
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return _Run(side, engine, settings, corpus).train(folder)


def build(settings: Settings, replica: int) -> nn.Module:
    """The model; an expert's weights follow from its number in the block, whichever rank holds it.

    Args:
        settings: sizes.
        replica: number of the data-parallel rank.
    """
    from deepspeed.moe.layer import MoE

    def experts(hidden: int, expert: nn.Module) -> nn.Module:
        # No random token selection and no noise, so that both sides route alike.
        return MoE(
            hidden, expert, settings.experts, settings.expert, settings.k, use_rts=False, top2_2nd_expert_sampling=False
        )

    def checkpoint(block: nn.Module, stream: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(block, stream, use_reentrant=False)

    torch.manual_seed(settings.seed)
    model = MoEGPT(settings.model, experts, checkpoint=checkpoint)
    for place, block in enumerate(model.blocks):
        if isinstance(block, MoEBlock):
            local = block.moe.deepspeed_moe.experts.deepspeed_experts  # type: ignore[union-attr]
            first = replica % settings.expert * len(local)  # type: ignore[arg-type]
            for number, expert in enumerate(local, first):  # type: ignore[arg-type]
                torch.manual_seed((settings.seed * 1009 + place) * 1009 + number)
                expert.fc1.reset_parameters()
                expert.fc2.reset_parameters()
    torch.manual_seed(settings.seed)
    return model


class _Run:
    def __init__(self, side: str, engine: Any, settings: Settings, corpus: Corpus | Tokens) -> None:
        self.side, self.engine, self.settings, self.corpus = side, engine, settings, corpus
        self.outcome = Outcome(
            parameters=sum(p.numel() for p in engine.module.parameters()), replicas=engine.dp_world_size
        )

    def train(self, folder: Path) -> Outcome:
        settings, outcome = self.settings, self.outcome
        metrics = MetricsLogger(folder) if dist.get_rank() == 0 else None
        for step in range(1, settings.steps + 1):
            began = time.perf_counter()
            loss = self._watched_step(step)
            outcome.seconds.append(time.perf_counter() - began)
            outcome.losses.append(loss)
            if metrics is not None:
                metrics.log(step, loss=loss, lr=settings.lr_at(step), seconds=outcome.seconds[-1])
            if step % settings.validate_every == 0 or step == settings.steps:
                outcome.validation.append((step, self._validate()))
                if metrics is not None:
                    self._say(step, metrics)
        if metrics is not None:
            metrics.finish()
        outcome.state_bytes = self._state_bytes()
        self.engine.destroy()
        return outcome

    def _watched_step(self, step: int) -> float:
        if step == ALLOCATING_STEP:
            found: list[float] = []
            device = torch.device(self.engine.device).type
            self.outcome.allocated = most_allocated(lambda: found.append(self._step(step)), device)
            return found[0]
        ledger = Ledger() if step == COUNTED_STEP else None
        with ledger if ledger is not None else nullcontext():
            loss = self._step(step)
        if ledger is not None:
            exchanges = [entry for entry in ledger.entries if entry.collective.op == "all_to_all"]
            self.outcome.exchanges = (len(exchanges), sum(e.collective.elements * e.itemsize for e in exchanges))
            self.outcome.sent = float(sum(entry.sent for entry in ledger.entries))
        return loss

    def _step(self, step: int) -> float:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = self.settings.lr_at(step)
        total = torch.zeros((), dtype=torch.float64)
        for ids, targets in self._share("training", self.settings.seed * 1_000_000_007 + step):
            loss = self.engine(ids, targets)
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach().double().cpu()
        return self._mean(total)

    def _share(self, part: str, seed: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's microbatches of a batch: with fewer data-parallel ranks there are more for each, and all are the same."""
        settings = self.settings
        ids, targets = self.corpus.batch(part, settings.batch, settings.model.context, seed)
        rank, device = dist.get_rank(self.engine.data_parallel_group), self.engine.device
        pieces = [
            t.chunk(self.engine.dp_world_size)[rank].to(device).split(settings.micro_batch) for t in (ids, targets)
        ]
        return list(zip(*pieces, strict=True))

    def _mean(self, total: Tensor) -> float:
        """Mean over all microbatches of a batch, from this rank's sum; tensor ranks have the same."""
        total = total.to(self.engine.device)
        dist.all_reduce(total)
        return total.item() / (self.settings.batch // self.settings.micro_batch) / self._tensor

    @property
    def _tensor(self) -> int:
        return dist.get_world_size() // self.engine.dp_world_size

    @torch.no_grad()
    def _validate(self) -> float:
        self.engine.eval()
        losses = []
        for number in range(self.settings.validation_batches):
            found = [self.engine(ids, targets).double().cpu() for ids, targets in self._share("validation", number)]
            losses.append(self._mean(torch.stack(found).sum()))
        self.engine.train()
        return sum(losses) / len(losses)

    def _state_bytes(self) -> int:
        """Bytes of parameters, float32 weights and moments."""
        optimizer = self.engine.basic_optimizer
        if isinstance(optimizer, FlatOptimizer):
            return optimizer.nbytes - sum(store.gradient.nbytes for store in optimizer.stores)
        masters = [master for group in optimizer.param_groups for master in group["params"]]
        moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        held = {tensor.data_ptr(): tensor.nbytes for tensor in [*self.engine.module.parameters(), *masters, *moments]}
        return sum(held.values())

    def _say(self, step: int, metrics: MetricsLogger) -> None:
        losses, (_, validation) = self.outcome.losses, self.outcome.validation[-1]
        metrics.log(step, val_loss=validation)
        print(
            f"{self.side:<9}  step {step:>{len(str(self.settings.steps))}}/{self.settings.steps}  loss {losses[-1]:7.4f}  "
            f"validation loss {validation:.4f}",
            flush=True,
        )
