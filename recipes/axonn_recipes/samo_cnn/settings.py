"""What a run is, read from the command line and checked before anything is started."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from axonn_plugins.config import ConfigError
from axonn_recipes.models.vgg import VGGConfig
from axonn_recipes.models.wide_resnet import WideResNetConfig
from axonn_recipes.pruned.compare import add_sides
from axonn_recipes.pruned.plan import Plan, add_arguments, given

MODELS = {"vgg19": "VGG-19", "wide_resnet": "WideResnet"}


@dataclass(frozen=True)
class Settings:
    """Model, batch and plan; `batch` is images a step, of all ranks."""

    name: str
    config: VGGConfig | WideResNetConfig
    batch: int
    plan: Plan


def scales() -> dict[str, dict[str, Any]]:
    """The scales of scales.json by name."""
    return json.loads(files("axonn_recipes.samo_cnn").joinpath("scales.json").read_text())


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="axonn train samo_cnn",
        description="VGG-19 or WideResnet-101, dense and pruned, with SAMO: the same steps, side by side.",
    )
    known = scales()
    made.add_argument("--model", choices=MODELS, default="vgg19", help="(default vgg19)")
    made.add_argument("--scale", choices=known, default="laptop", help="sizes to begin with (default laptop)")
    add_arguments(made, Plan(**known["laptop"]["plan"]))
    made.add_argument("--width", type=float, help="by what the scale's channels are multiplied (default 1)")
    made.add_argument("--batch", type=int, help=f"images a step, over all ranks (default {known['laptop']['batch']})")
    made.add_argument(
        "--data", help="a folder with CIFAR-10 or CIFAR-100, Python or binary version (default: scikit-learn's digits)"
    )
    add_sides(made, "samo_cnn")
    return made


def resolve(options: argparse.Namespace) -> Settings:
    """The run that the command line asks for.

    Raises:
        ConfigError: the first mistake.
    """
    scale = scales()[options.scale]
    plan = replace(Plan(**scale["plan"]), **given(options))
    plan.check()
    batch = options.batch if options.batch is not None else scale["batch"]
    if batch < 1 or batch % plan.ranks:
        raise ConfigError(f"--batch {batch} is no multiple of the {plan.ranks} ranks; give one")
    width = 1.0 if options.width is None else options.width
    if not 0 < width <= 16:
        raise ConfigError(f"--width {width:g} is not a factor; give a number above 0 and up to 16, such as 0.5")
    return Settings(MODELS[options.model], _config(options.model, scale[options.model], width), batch, plan)


def _config(model: str, sizes: dict[str, Any], width: float) -> VGGConfig | WideResNetConfig:
    if model == "vgg19":
        config = VGGConfig(**sizes)
        return replace(config, width=config.width * width, hidden=max(round(config.hidden * width), 1))
    wide = WideResNetConfig(**{**sizes, "depths": tuple(sizes.get("depths", WideResNetConfig.depths))})
    return replace(wide, base=max(round(wide.base * width), 1))
