"""How a network is trained, dense and pruned: the same steps in the same order of data."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from axonn_plugins.config import ConfigError
from axonn_recipes.options import at_least_one

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Dtype = Literal["fp32", "bf16"]
PRUNERS = ("early_bird", "magnitude")
SCOPES = ("global", "layer")


@dataclass(frozen=True)
class Plan:
    """Everything besides model and data that decides the numbers of a run.

    Attributes:
        ranks: data-parallel ranks.
        steps: optimizer steps of either side; those that the search for a ticket takes are among them.
        lr: highest learning rate of the dense side, and of the pruned one until it is pruned.
        pruned_lr: the same after pruning.
        weight_decay: AdamW's.
        beta2: AdamW's.
        clip: norm that gradients are clipped to; None: they are not.
        sparsity: share of the weights of matrices and convolutions that is pruned.
        pruner: one of `PRUNERS`.
        scope: one of `SCOPES`.
        window: see `samo.EarlyBird`.
        epsilon: see there.
        every: steps between observations of the search.
        latest: share of the steps after which weights are pruned by magnitude if no ticket is found; the pruner
            "magnitude" does not look for one.
        dtype: a key of `DTYPES`.
        seed: of weights and batches.
        validate_every: steps between validations.
    """

    ranks: int = 2
    steps: int = 1000
    lr: float = 1e-3
    pruned_lr: float = 1e-3
    weight_decay: float = 0.1
    beta2: float = 0.95
    clip: float | None = 1.0
    sparsity: float = 0.9
    pruner: str = "early_bird"
    scope: str = "global"
    window: int = 5
    epsilon: float = 0.1
    every: int = 10
    latest: float = 0.5
    dtype: str = "fp32"
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
                raise ConfigError(
                    f"--{name} {getattr(self, name)} is not a share; give a number from 0 to 1, such as {getattr(Plan, name)}"
                )
        for name in ("lr", "pruned_lr"):
            if not 0 < getattr(self, name) < math.inf:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} {getattr(self, name)} is not positive; give a learning rate such as 1e-3")


_HELP = {
    "ranks": "data-parallel processes to start",
    "steps": "optimizer steps of either side",
    "lr": "highest learning rate",
    "pruned_lr": "highest learning rate after pruning",
    "sparsity": "share of the weights to prune",
    "window": "masks that the newest must be like, early_bird",
    "epsilon": "distance below which masks are alike, early_bird",
    "every": "steps between two masks, early_bird",
    "latest": "share of the steps after which weights are pruned by magnitude, ticket or not",
    "seed": "of weights and batches",
    "validate_every": "steps between validations",
}


def add_arguments(parser: argparse.ArgumentParser, defaults: Plan) -> None:
    """One option for each setting."""
    for name, text in _HELP.items():
        value = getattr(defaults, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=f"{text} (default {value:g})")
    parser.add_argument("--pruner", choices=PRUNERS, help=f"(default {defaults.pruner})")
    parser.add_argument("--scope", choices=SCOPES, help=f"of thresholds (default {defaults.scope})")
    parser.add_argument("--dtype", choices=DTYPES, help=f"that the model computes with (default {defaults.dtype})")


def given(options: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of a plan."""
    values = {field.name: getattr(options, field.name, None) for field in fields(Plan)}
    return {name: value for name, value in values.items() if value is not None}
