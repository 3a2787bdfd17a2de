"""The training of a network, dense and pruned: the same steps in the same order of data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from tyro import conf

from axonn_plugins.config import ConfigError
from axonn_recipes.options import at_least_one, rates_and_seed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Dtype = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Plan:
    """Everything besides model and data that decides the numbers of a run.

    Attributes:
        ranks: data-parallel processes to start.
        steps: optimizer steps of either side; those that the search for a ticket takes are among them.
        lr: highest learning rate of the dense side, and of the pruned one until it is pruned.
        pruned_lr: highest learning rate after pruning.
        weight_decay: AdamW's.
        beta2: AdamW's.
        clip: norm that gradients are clipped to; None: they are not.
        sparsity: share of the weights of matrices and convolutions to prune.
        pruner: early_bird looks for a ticket, magnitude does not.
        scope: of thresholds.
        window: masks that the newest must be like, early_bird; see `samo.EarlyBird`.
        epsilon: distance below which masks are alike, early_bird.
        every: steps between two masks, early_bird.
        latest: share of the steps after which weights are pruned by magnitude, ticket or not.
        dtype: that the model computes with.
        seed: of weights and batches.
        validate_every: steps between validations.
    """

    ranks: int = 2
    steps: int = 1000
    lr: float = 1e-3
    pruned_lr: float = 1e-3
    weight_decay: conf.Fixed[float] = 0.1
    beta2: conf.Fixed[float] = 0.95
    clip: conf.Fixed[float | None] = 1.0
    sparsity: float = 0.9
    pruner: Literal["early_bird", "magnitude"] = "early_bird"
    scope: Literal["global", "layer"] = "global"
    window: int = 5
    epsilon: float = 0.1
    every: int = 10
    latest: float = 0.5
    dtype: Dtype = "fp32"
    seed: int = 1
    validate_every: int = 50

    def lr_at(self, step: int, pruned: bool) -> float:
        """Learning rate of a step, the first being 1: linear warm-up over a tenth of the run, then a cosine to a tenth."""
        top, warm = self.pruned_lr if pruned else self.lr, max(self.steps // 10, 1)
        if step <= warm:
            return top * step / warm
        return top * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(self.steps - warm, 1))))

    @property
    def last_dense_step(self) -> int:
        """After which step weights are pruned at the latest."""
        return round(self.latest * self.steps)

    @property
    def device(self) -> str:
        """Where to train: on GPUs where there is one for each rank."""
        return "cuda" if torch.cuda.device_count() >= self.ranks else "cpu"

    def check(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ConfigError: the first mistake.
        """
        at_least_one(self, "ranks", "steps", "every", "window", "validate_every")
        for name, low, high in (("sparsity", 0, 1), ("latest", 0, 1), ("epsilon", 1e-9, 1)):
            if not low <= getattr(self, name) <= high:
                least = "above 0 and up" if low else "from 0"
                raise ConfigError(
                    f"--{name} {getattr(self, name)} is not a share; give a number {least} to 1, such as {getattr(Plan, name)}"
                )
        if self.sparsity == 1:
            raise ConfigError(f"--sparsity {self.sparsity} keeps nothing of any layer; use a lower share, such as 0.9")
        rates_and_seed(self, "lr", "pruned_lr")
