"""The training of each side: the same GPT on the same windows."""

from __future__ import annotations

import contextlib
import io
import os
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from axonn_plugins import processors
from axonn_plugins.autoload import activate  # noqa: E402
from axonn_plugins.optim.memory import host_bytes, step_bytes
from axonn_plugins.pipeline.timeline import split  # noqa: E402
from axonn_recipes.data import Corpus  # noqa: E402
from axonn_recipes.models.gpt import GPT, GPTConfig  # noqa: E402
from axonn_recipes.pipeline.settings import WEIGHT_DECAY, Settings  # noqa: E402


@dataclass
class Outcome:
    """The results of a side; of the first rank.

    Attributes:
        losses: by step, mean over the batch.
        seconds: by step.
        splits: by step, seconds of this rank by phase; of the message-driven side.
        state: bytes of weights, gradients and optimizer state on the device, and in host memory beside it; with --offload or
            --sparsity.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    splits: list[dict[str, float]] = field(default_factory=list)
    state: tuple[int, int] | None = None


class Part(nn.Module):
    """Part `number` of a GPT: embeddings, a block, or the norm and the head; its weights are those of the whole model's."""

    def __init__(self, config: GPTConfig, seed: int, number: int) -> None:
        super().__init__()
        whole = serial_model(config, seed)
        self.number, self.last = number, number == config.layers + 1
        if number == 0:
            self.tokens, self.positions = whole.tokens, whole.positions
        elif self.last:
            self.norm, self.head = whole.norm, whole.head
        else:
            self.block = whole.blocks[number - 1]

    def forward(self, x: Tensor) -> Tensor:
        """Token ids to features, features to features, or features to logits."""
        if self.number == 0:
            return self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(x)) if self.last else self.block(x)


def serial_model(config: GPTConfig, seed: int) -> GPT:
    """The GPT with its first weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(config)


def entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in nats a token."""
    logits = logits.flatten(0, 1)
    return F.cross_entropy(logits.float() if logits.element_size() < 4 else logits, targets.flatten())


def train(side: str, settings: Settings, corpus: Corpus) -> Outcome:
    """Train one side; every rank calls it."""
    processors.share_among(1 if side == "serial" else settings.ranks)
    warnings.filterwarnings("ignore", category=FutureWarning)
    return _serial(settings, corpus) if side == "serial" else _pipeline(side, settings, corpus)


def _serial(settings: Settings, corpus: Corpus) -> Outcome:
    model = serial_model(settings.model, settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=WEIGHT_DECAY)
    outcome = Outcome()
    for step in range(settings.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        ids, targets = corpus.batch("training", settings.batch, settings.context, settings.seed + step)
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.dtype == "bf16"):
            loss = entropy(model(ids), targets)
        loss.backward()
        optimizer.step()
        outcome.losses.append(loss.item())
        outcome.seconds.append(time.perf_counter() - began)
    return outcome


def _pipeline(side: str, settings: Settings, corpus: Corpus) -> Outcome:
    activate()
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", verbose=False)
    parts = [LayerSpec(Part, settings.model, settings.seed, number) for number in range(settings.layers + 2)]
    with contextlib.redirect_stdout(io.StringIO()):
        module = PipelineModule(parts, num_stages=settings.stages, loss_fn=entropy, partition_method="parameters")
        config = settings.ds_config(side)
        engine: Any = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]
    ours = side == "message_driven"
    if ours:
        engine.record_events()
    outcome = Outcome()
    for step in range(settings.steps):
        began = time.perf_counter()
        batch = corpus.batch("training", settings.batch, settings.context, settings.seed + step)
        ids, targets = (
            whole.chunk(settings.pipelines)[engine.grid.get_data_parallel_rank()].split(settings.microbatch)
            for whole in batch
        )
        outcome.losses.append(float(engine.train_batch(iter(list(zip(ids, targets, strict=True))))))
        outcome.seconds.append(time.perf_counter() - began)
        if ours:
            outcome.splits.append(split(engine.events))
    if ours and settings.offload:
        optimizer = engine.optimizer
        away = host_bytes(optimizer.stores)
        outcome.state = optimizer.nbytes - away + step_bytes(optimizer.stores, optimizer.tile_size), away
    elif ours and settings.sparsity is not None:
        outcome.state = engine.optimizer.nbytes, 0
    return outcome
