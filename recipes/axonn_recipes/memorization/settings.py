"""Settings of a run of the study, read from the command line and checked before anything is started."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
from tyro import conf

from axonn_plugins.cli.options import read
from axonn_plugins.config import ConfigError
from axonn_recipes.bench_tp.settings import under_torchrun
from axonn_recipes.options import Run, at_least_one, grid_of, heads_fit, part
from axonn_tp import Grid

BUCKETS = ("control", "low", "middle", "high")
LOSSES = ("standard", "goldfish")
HEADS, LAYERS = 4, 2
SUFFIX = 50
"""Tokens at the end of a page that a model is to write by itself."""
_PROG = "axonn train memorization"
_GOLDFISH = {"k": 2, "h": 13}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides the numbers of a run, besides models, seeds and text.

    Attributes:
        pages: in each of the four buckets.
        epochs: how often the buckets low, middle and high are seen; control is not.
        tokens: of a page that are read, the first of them.
        warmup: steps on pages of no bucket, over which the learning rate rises.
        steps: after that, in which buckets are among pages of no bucket, and the learning rate falls to a tenth.
        batch: pages a step, over all ranks.
        micro_batch: pages of a rank at a time; at most all of a step.
        lr: highest learning rate.
        dtype: that the model computes with.
        grid: gx,gy,gz,gdata.
    """

    pages: int
    epochs: tuple[int, int, int]
    tokens: int
    warmup: int
    steps: int
    batch: int
    micro_batch: int
    lr: float
    dtype: Literal["fp32", "bf16"]
    grid: str

    @property
    def injected(self) -> int:
        """Pages of buckets that are trained on, as often as they are."""
        return self.pages * sum(self.epochs)

    @property
    def fillers(self) -> int:
        """Pages of no bucket that are trained on, each once."""
        return (self.warmup + self.steps) * self.batch - self.injected

    @cached_property
    def shape(self) -> Grid:
        """The grid."""
        return grid_of(self.grid)

    def lr_at(self, step: int) -> float:
        """Learning rate of a step, the first being 1: a linear rise over the warm-up, then a cosine to a tenth."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - self.warmup) / self.steps)))

    def block(self, loss: str, labels: str, plan: Any) -> dict[str, Any]:
        """The block that would stand under "axonn" in a DeepSpeed configuration.

        Args:
            loss: standard, or goldfish.
            labels: the argument of the model's forward that has them.
            plan: how its layers use the grid.
        """
        shape = self.shape
        block: dict[str, Any] = {"tensor_parallel": {"gx": shape.gx, "gy": shape.gy, "gz": shape.gz, "plan": plan}}
        return block | ({"goldfish": _GOLDFISH | {"labels": labels}} if loss == "goldfish" else {})


@dataclass(frozen=True, kw_only=True)
class Options(Settings, Run):
    """Train models of several sizes on pages that they see more or less often, with the standard and the goldfish loss.

    What a run's folder holds of the same settings is not run again, so an interrupted run goes on where it was.

    Attributes:
        scale: laptop trains small models from nothing, on bytes; the others go on with a checkpoint of that model, as the paper did.
        quick: two small models and one seed.
        hidden: features of the small models, one model each; separated by spaces or commas.
        seeds: of weights, buckets and order; one run of each; separated by spaces or commas.
        data: a folder of text: each file is a page, and each line of a .jsonl file that has a "text"; by itself made-up words, and on
            the laptop's scale windows of all the text are the pages.
        checkpoint: HF folder with config.json, safetensors and a tokenizer.
    """

    scale: Literal[
        "laptop",
        "tinyllama-1b",
        "llama-2-7b",
        "llama-2-13b",
        "llama-2-70b",
        "llama-3.1-8b",
        "llama-3.1-70b",
        "llama-3.1-405b",
    ] = "laptop"
    quick: bool = False
    hidden: tuple[str, ...] = ()
    seeds: tuple[str, ...]
    data: Path | None = None
    checkpoint: Path | None = None
    model: conf.Fixed[str] = ""


def asked(arguments: Sequence[str]) -> Options:
    """The options of a command line; what it does not give is as in its scale.

    Raises:
        ConfigError: a mistake of the user's.
    """
    first = read(Options, arguments, _PROG, _of("laptop"))
    if first.quick and first.scale != "laptop":
        raise ConfigError(f"--quick is of the laptop's scale, not of --scale {first.scale}; leave one of the two out")
    return read(Options, arguments, _PROG, _of("quick" if first.quick else first.scale))


def _of(name: str) -> Options:
    scales = json.loads(files("axonn_recipes.memorization").joinpath("scales.json").read_text())
    numbers = scales[name] if name in ("laptop", "quick") else scales["paper"] | scales[name]
    lists = {key: tuple(value) for key, value in numbers.items() if isinstance(value, list)}
    return Options(scale="laptop" if name == "quick" else name, **numbers | lists)  # type: ignore[arg-type]


def numbers(option: str, given: Sequence[str]) -> list[int]:
    """Whole numbers that are separated by spaces or commas, each once.

    Raises:
        ConfigError: one is not.
    """
    words = [word for one in given for word in one.split(",") if word]
    if not words or not all(word.isdecimal() for word in words):
        raise ConfigError(f"{option} {' '.join(given)} is not a list of whole numbers; write them as in {option} 1 2 3")
    return list(dict.fromkeys(map(int, words)))


def resolve(options: Options) -> Settings:
    """The settings that are asked for.

    Raises:
        ConfigError: the first mistake.
    """
    settings = Settings(**part(Settings, options))
    at_least_one(settings, "pages", "warmup", "steps", "batch", "micro_batch")
    low, middle, high = settings.epochs
    if not 1 <= low < middle < high:
        raise ConfigError(f"--epochs {low} {middle} {high} do not rise; give three numbers such as 6 24 72")
    if settings.tokens <= SUFFIX + _GOLDFISH["h"]:
        least = SUFFIX + _GOLDFISH["h"] + 1
        raise ConfigError(
            f"--tokens {settings.tokens} leaves no beginning before the last {SUFFIX}; give {least} or more"
        )
    if not 0 < settings.lr < math.inf:
        raise ConfigError(f"--lr {settings.lr} is not positive; give a learning rate such as 3e-3")
    if settings.injected > settings.steps * settings.batch:
        raise ConfigError(
            f"--steps {settings.steps} of {settings.batch} pages have no room for the {settings.injected} of the buckets "
            f"({settings.pages} pages, {low} + {middle} + {high} epochs); give {-(-settings.injected // settings.batch)} steps or more"
        )
    if under_torchrun() and int(os.environ["WORLD_SIZE"]) != settings.shape.world:
        raise ConfigError(
            f"--grid {settings.grid} has {settings.shape.world} ranks, and torchrun started {os.environ['WORLD_SIZE']}; make them equal"
        )
    if settings.batch % settings.shape.batch:
        raise ConfigError(
            f"--batch {settings.batch} does not divide by gz*gdata = {settings.shape.batch} of --grid {settings.grid}; use a multiple"
        )
    share = settings.batch // settings.shape.batch
    if share % min(settings.micro_batch, share):
        raise ConfigError(
            f"--micro-batch {settings.micro_batch} does not divide the {share} pages of a rank; use a divisor of it"
        )
    if (largest := max(numbers("--seeds", options.seeds))) >= 2**63:
        raise ConfigError(f"--seeds {largest} is not below 2**63, as random numbers need; give a smaller one")
    for hidden in numbers("--hidden", options.hidden) if options.scale == "laptop" else []:
        at_least_one_width(hidden, settings.shape)
    return settings


def at_least_one_width(hidden: int, grid: Grid) -> None:
    """Refuse a width that makes no model, or that the grid does not split.

    Raises:
        ConfigError: it is so.
    """
    heads_fit(hidden, HEADS)
    if hidden < 1 or HEADS % grid.gx or hidden % (grid.gx * grid.gy):
        raise ConfigError(
            f"--hidden {hidden} with {HEADS} heads does not divide by gx = {grid.gx} and gy = {grid.gy}; choose another, or another --grid"
        )


def device(grid: Grid) -> str:
    """Where to train: on GPUs where there is one for each rank."""
    return "cuda" if torch.cuda.device_count() >= grid.world else "cpu"
