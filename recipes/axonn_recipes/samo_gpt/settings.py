"""Settings of a run, read from the command line and checked before anything is started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal

from axonn_plugins.config import ConfigError
from axonn_recipes.models.gpt import GPTConfig
from axonn_recipes.options import at_least_one, heads_fit, part, read_scaled
from axonn_recipes.pruned.compare import Sides
from axonn_recipes.pruned.plan import Plan

SIZES = ("layers", "heads", "hidden", "context")


@dataclass(frozen=True)
class Settings:
    """Model, batch and plan; `batch` and `micro_batch` are windows, of all ranks and of one at a time."""

    model: GPTConfig
    batch: int
    micro_batch: int
    plan: Plan


def scales() -> dict[str, dict[str, Any]]:
    """The scales of scales.json by name."""
    return json.loads(files("axonn_recipes.samo_gpt").joinpath("scales.json").read_text())


@dataclass(frozen=True, kw_only=True)
class Options(Plan, Sides):
    """A GPT dense and pruned, with SAMO: the same steps, side by side.

    Attributes:
        scale: sizes to begin with.
        layers: transformer blocks.
        heads: attention heads.
        hidden: features of the residual stream.
        context: tokens a window.
        batch: windows a step, over all ranks.
        micro_batch: windows of a rank at a time; at most all of a step.
        validation_batches: batches to validate with.
        data: a text file or folder, or a folder with train.bin and val.bin of 16-bit token ids; by itself the source of
            Python's standard library.
    """

    scale: Literal["laptop", "gpt3_xl", "gpt3_2.7b"] = "laptop"
    layers: int
    heads: int
    hidden: int
    context: int
    batch: int
    micro_batch: int
    validation_batches: int = 32
    data: str | None = None


def asked(arguments: Sequence[str]) -> Options:
    """The options of a command line.

    Raises:
        ConfigError: a mistake of the user's.
    """
    return read_scaled(Options, arguments, "axonn train samo_gpt", _of)


def _of(name: str) -> Options:
    scale = scales()[name]
    sizes = {key: scale["model"][key] for key in SIZES}
    return Options(scale=name, batch=scale["batch"], micro_batch=scale["micro_batch"], **sizes, **scale["plan"])  # type: ignore[arg-type]


def resolve(options: Options) -> Settings:
    """The run that the options ask for.

    Raises:
        ConfigError: the first mistake.
    """
    plan = Plan(**part(Plan, options))
    plan.check()
    at_least_one(options, *SIZES, "batch", "micro_batch", "validation_batches")
    model = replace(GPTConfig(**scales()[options.scale]["model"]), **{name: getattr(options, name) for name in SIZES})
    heads_fit(model.hidden, model.heads)
    if options.batch % plan.ranks:
        raise ConfigError(f"--batch {options.batch} does not divide by the {plan.ranks} ranks; use a multiple")
    share = options.batch // plan.ranks
    micro = min(options.micro_batch, share)
    if share % micro:
        raise ConfigError(f"--micro-batch {micro} does not divide the {share} windows of a rank; use a divisor of it")
    return Settings(model, options.batch, micro, plan)
