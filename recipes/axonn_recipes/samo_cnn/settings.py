"""Settings of a run, read from the command line and checked before anything is started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal

from axonn_plugins.config import ConfigError
from axonn_recipes.models.vgg import VGGConfig
from axonn_recipes.models.wide_resnet import WideResNetConfig
from axonn_recipes.options import part, read_scaled
from axonn_recipes.pruned.compare import Sides
from axonn_recipes.pruned.plan import Plan

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


@dataclass(frozen=True, kw_only=True)
class Options(Plan, Sides):
    """VGG-19 or WideResnet-101, dense and pruned, with SAMO: the same steps, side by side.

    Attributes:
        model: which.
        scale: sizes to begin with.
        width: by what the scale's channels are multiplied.
        batch: images a step, over all ranks.
        data: a folder with CIFAR-10 or CIFAR-100, Python or binary version; by itself scikit-learn's digits.
    """

    model: Literal["vgg19", "wide_resnet"] = "vgg19"
    scale: Literal["laptop", "cifar", "paper"] = "laptop"
    width: float = 1.0
    batch: int
    data: str | None = None


def asked(arguments: Sequence[str]) -> Options:
    """The options of a command line.

    Raises:
        ConfigError: a mistake of the user's.
    """
    return read_scaled(Options, arguments, "axonn train samo_cnn", _of)


def _of(name: str) -> Options:
    scale = scales()[name]
    return Options(scale=name, batch=scale["batch"], **scale["plan"])  # type: ignore[arg-type]


def resolve(options: Options) -> Settings:
    """The run that the options ask for.

    Raises:
        ConfigError: the first mistake.
    """
    plan = Plan(**part(Plan, options))
    plan.check()
    batch, width = options.batch, options.width
    if batch < 1 or batch % plan.ranks:
        raise ConfigError(f"--batch {batch} is no multiple of the {plan.ranks} ranks; give one")
    if not 0 < width <= 16:
        raise ConfigError(f"--width {width:g} is not a factor; give a number above 0 and up to 16, such as 0.5")
    sizes = scales()[options.scale][options.model]
    return Settings(MODELS[options.model], _config(options.model, sizes, width), batch, plan)


def _config(model: str, sizes: dict[str, Any], width: float) -> VGGConfig | WideResNetConfig:
    if model == "vgg19":
        config = VGGConfig(**sizes)
        return replace(config, width=config.width * width, hidden=max(round(config.hidden * width), 1))
    wide = WideResNetConfig(**{**sizes, "depths": tuple(sizes.get("depths", WideResNetConfig.depths))})
    return replace(wide, base=max(round(wide.base * width), 1))
