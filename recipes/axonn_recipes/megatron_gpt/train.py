"""The work of each rank: Megatron's process groups, model and schedule, a step after another."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from torch import Tensor

from axonn_plugins.hosts.megatron import cpu, patch
from axonn_plugins.observe.metrics import MetricsLogger
from axonn_recipes.data import Corpus
from axonn_recipes.megatron_gpt.model import build
from axonn_recipes.megatron_gpt.settings import Settings
from axonn_recipes.megatron_gpt.text import read


@dataclass
class Outcome:
    """The results of a run; the same on every rank.

    Attributes:
        losses: of each step, in nats a byte.
        norms: of each step's gradient, before it was clipped.
        seconds: of each step on this rank.
        parameters: on this rank.
        first: number of the first step, more than 1 after a checkpoint.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    parameters: int = 0
    first: int = 1


def train(
    settings: Settings,
    prefix: Path,
    folder: Path | None = None,
    load: Path | None = None,
    save: Path | None = None,
) -> Outcome:
    """Train on this rank; every rank calls it.

    Args:
        settings: the run.
        prefix: of the prepared text.
        folder: for metrics; none are written when None.
        load: a checkpoint to go on from.
        save: where one is written at the end.
    """
    start(settings)
    model, optimizer = build(settings)
    outcome = Outcome(parameters=sum(parameter.numel() for parameter in model.parameters()))
    if load is not None:
        outcome.first = 1 + _load(model, optimizer, load)
    steps = Steps(settings, model, optimizer, read(prefix))
    metrics = MetricsLogger(folder) if folder is not None and dist.get_rank() == 0 else None
    for step in range(outcome.first, outcome.first + settings.steps):
        began = time.perf_counter()
        loss, norm = steps.take(step)
        outcome.losses.append(loss)
        outcome.norms.append(norm)
        outcome.seconds.append(time.perf_counter() - began)
        if metrics is not None:
            metrics.log(step, loss=loss, grad_norm=norm, seconds=outcome.seconds[-1])
            if step % 10 == 0 or step == outcome.first:
                print(f"step {step:>5}  loss {loss:.4f}  gradient norm {norm:.3f}", flush=True)
    if metrics is not None:
        metrics.finish()
    if save is not None:
        _save(model, optimizer, save, outcome.first + settings.steps - 1)
    stop(settings, model)
    return outcome


def start(settings: Settings, **sizes: int) -> None:
    """Make process groups, with our layers in Megatron where the settings ask for them.

    Args:
        settings: the run.
        sizes: others of Megatron's `initialize_model_parallel`.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        cpu.enable_core()
        torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if settings.grid is not None:
        patch.install(settings.grid)
    parallel_state.initialize_model_parallel(settings.tensor, settings.pipeline_model_parallel_size, **sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(settings.seed, force_reset_rng=True)


def stop(settings: Settings, model: DistributedDataParallel) -> None:
    """Undo what `start` did, so that another run may follow; the default process group stays."""
    if settings.overlap_param_gather:
        model.disable_forward_pre_hook()
    parallel_state.destroy_model_parallel()
    if settings.grid is not None:
        patch.uninstall()


class Steps:
    """Training steps of a model on a text.

    Args:
        settings: the run.
        model: this rank's, as `build` made it.
        optimizer: its.
        corpus: the text.
    """

    def __init__(
        self, settings: Settings, model: DistributedDataParallel, optimizer: MegatronOptimizer, corpus: Corpus
    ):
        self.settings, self.model, self.optimizer, self.corpus = settings, model, optimizer, corpus
        self.run = get_forward_backward_func()

    def take(self, step: int) -> tuple[float, float]:
        """Train on a batch; its loss and the norm of its gradient, the same on every rank.

        Args:
            step: chooses the batch.
        """
        settings = self.settings
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        found = self.run(
            forward_step_func=_forward,
            data_iterator=iter(self._share(step)),
            model=self.model,
            num_microbatches=settings.micro_batches,
            seq_length=settings.context,
            micro_batch_size=settings.micro_batch,
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()
        return self._mean([result["loss"] for result in found]), float(norm)

    def _share(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's microbatches of a step."""
        settings = self.settings
        seed = settings.seed * 1_000_000_007 + step
        batch = self.corpus.batch("training", settings.batch, settings.context, seed)
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        ids, targets = (whole.chunk(ranks)[rank].to(device).split(settings.micro_batch) for whole in batch)
        return list(zip(ids, targets, strict=True))

    def _mean(self, losses: list[Tensor]) -> float:
        """Mean loss of a step's samples, which the last stage knows of this rank's share."""
        stages = self.settings.pipeline_model_parallel_size
        total = torch.stack(losses).sum().double() if losses else torch.zeros((), dtype=torch.float64)
        total = total.to(next(self.model.parameters()).device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        if stages > 1:
            dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        return total.item() / (self.settings.batch // self.settings.micro_batch)


def _forward(batches: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
    ids, targets = next(batches)
    context = ids.shape[1]
    positions = torch.arange(context, device=ids.device).expand_as(ids)
    hidden = torch.ones(context, context, dtype=torch.bool, device=ids.device).triu(1)[None, None]
    return model(ids, positions, hidden, labels=targets), partial(_loss)


def _loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    mean = losses.float().mean()
    return mean, {"loss": mean.detach().clone()}


def _state(model: DistributedDataParallel, optimizer: MegatronOptimizer, step: int, loading: bool) -> dict[str, Any]:
    # A distributed optimizer's state in the form that any ranks can read.
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    weights = unwrap_model(model).sharded_state_dict(metadata=metadata)
    told = optimizer.sharded_state_dict(weights, is_loading=loading, metadata=metadata)
    return {"model": weights, "optimizer": told, "step": step}


def _save(model: DistributedDataParallel, optimizer: MegatronOptimizer, folder: Path, step: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(_state(model, optimizer, step, loading=False), str(folder))


def _load(model: DistributedDataParallel, optimizer: MegatronOptimizer, folder: Path) -> int:
    """Put a checkpoint into a model and its optimizer; the step it was saved after."""
    state = dist_checkpointing.load(_state(model, optimizer, 0, loading=True), str(folder))
    unwrap_model(model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
