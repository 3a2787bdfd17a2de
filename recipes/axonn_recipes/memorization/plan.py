"""The plan of a run: models, grid, steps, tokens, and the memory of a rank by the planner's model."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from axonn_plugins.planner import model as sizes
from axonn_plugins.planner.axonn import Grids
from axonn_plugins.planner.fourd import memory
from axonn_plugins.planner.setting import Setting
from axonn_recipes.memorization.settings import BUCKETS, HEADS, LAYERS, SUFFIX, Options, Settings, numbers


def described(options: Options, settings: Settings) -> str:
    """The run in words.

    Raises:
        ConfigError: a model's sizes cannot be read.
    """
    steps, low, middle, high = settings.warmup + settings.steps, *settings.epochs
    lines = [
        settings.shape.draw(),
        "",
        f"{len(BUCKETS)} buckets of {settings.pages} pages: never seen, and {low}, {middle} and {high} times; {settings.fillers:,} others once",
        f"{settings.warmup} + {settings.steps} steps of {settings.batch} x {settings.tokens} tokens: {steps * settings.batch * settings.tokens:,} "
        f"a run, of which buckets are {settings.injected * settings.tokens:,}",
        f"AdamW, learning rate up to {settings.lr:g} and down to {settings.lr / 10:g}, {settings.dtype}; memorized are the last {SUFFIX} tokens",
        *(_needs(model, settings) for model in _models(options, settings)),
        f"each with the standard and the goldfish loss, seeds {', '.join(map(str, numbers('--seeds', options.seeds)))}",
    ]
    return "\n".join(lines)


def _models(options: Options, settings: Settings) -> Iterable[sizes.Model]:
    if options.scale != "laptop":
        yield sizes.load(str(options.checkpoint or options.model), "--checkpoint", settings.tokens)
        return
    for hidden in numbers("--hidden", options.hidden):
        yield sizes.Transformer(f"hidden {hidden}", LAYERS, hidden, HEADS, settings.tokens, vocabulary=256)


def _needs(model: sizes.Model, settings: Settings) -> str:
    """Parameters, and what a rank holds: activations as with activation checkpointing where a checkpoint goes on."""
    shape = settings.shape
    at = Grids(*(np.array([size], np.int64) for size in (shape.gx, shape.gy, shape.gz, shape.gdata)))
    share = settings.batch // shape.batch
    microbatches = share // min(settings.micro_batch, share)
    whole = settings.dtype == "fp32"
    setting = Setting(recompute=not whole, float32=whole, keep_gathered=float(whole))
    held = memory(model, at, microbatches, settings.batch, setting=setting)
    kinds = ("weights", "gradients", "optimizer", "activations")
    parts = ", ".join(f"{kind} {_bytes(getattr(held, kind).item())}" for kind in kinds)
    return f"{model.name}: {count(model.parameters)} parameters; a rank holds {_bytes(held.total.item())} by the planner's model: {parts}"


def count(number: float) -> str:
    """A number in words."""
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size / 10:
            return f"{number / size:.2f} {unit}"
    return f"{number:,.0f}"


def _bytes(count: float) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.2f} MiB"
