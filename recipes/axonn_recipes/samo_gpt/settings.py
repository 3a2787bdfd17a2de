"""What a run is, read from the command line and checked before anything is started."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from axonn_plugins.config import ConfigError
from axonn_recipes.models.gpt import GPTConfig
from axonn_recipes.options import heads_fit
from axonn_recipes.pruned.compare import add_sides
from axonn_recipes.pruned.plan import Plan, add_arguments, given

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


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="axonn train samo_gpt", description="A GPT dense and pruned, with SAMO: the same steps, side by side."
    )
    known = scales()
    made.add_argument("--scale", choices=known, default="laptop", help="sizes to begin with (default laptop)")
    add_arguments(made, Plan(**known["laptop"]["plan"]))
    for name in SIZES:
        made.add_argument(f"--{name}", type=int, help=f"(default {known['laptop']['model'][name]})")
    made.add_argument("--batch", type=int, help=f"windows a step, over all ranks (default {known['laptop']['batch']})")
    made.add_argument("--micro-batch", type=int, help="windows of a rank at a time (default: all of a step)")
    made.add_argument("--validation-batches", type=int, default=32, help="(default 32)")
    made.add_argument(
        "--data",
        help="a text file or folder, or a folder with train.bin and val.bin of 16-bit token ids (default: the source of Python's "
        "standard library)",
    )
    add_sides(made, "samo_gpt")
    return made


def resolve(options: argparse.Namespace) -> Settings:
    """The run that the command line asks for.

    Raises:
        ConfigError: the first mistake.
    """
    scale = scales()[options.scale]
    plan = replace(Plan(**scale["plan"]), **given(options))
    plan.check()
    sizes = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    batch = options.batch if options.batch is not None else scale["batch"]
    micro = options.micro_batch if options.micro_batch is not None else scale["micro_batch"]
    for name, value in {
        **sizes,
        "batch": batch,
        "micro-batch": micro,
        "validation-batches": options.validation_batches,
    }.items():
        if value < 1:
            raise ConfigError(f"--{name} {value} is not at least 1; give a positive number")
    model = replace(GPTConfig(**scale["model"]), **sizes)
    heads_fit(model.hidden, model.heads)
    if batch % plan.ranks:
        raise ConfigError(f"--batch {batch} does not divide by the {plan.ranks} ranks; use a multiple")
    share = batch // plan.ranks
    micro = min(micro, share)
    if share % micro:
        raise ConfigError(f"--micro-batch {micro} does not divide the {share} windows of a rank; use a divisor of it")
    return Settings(model, batch, micro, plan)
