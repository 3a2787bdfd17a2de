"""The two models of the validation, how their layers use the grid, and what they learn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from axonn_plugins.config import ConfigError
from axonn_recipes import data
from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_recipes.models.unet import UNet, UNetConfig, cosine_schedule, diffuse
from axonn_recipes.models.unet_plan import unet_plan
from axonn_recipes.validation.settings import MODELS, Settings
from axonn_tp import LayerPlan, place
from axonn_tp.grid.mesh import AXES

TIMESTEPS = 1000


@dataclass(frozen=True)
class Size:
    """The size of the models and of a step's batch."""

    gpt: GPTConfig
    unet: UNetConfig
    pixels: int
    batch: Mapping[str, int]


SIZES = {
    "small": Size(
        GPTConfig(vocabulary=256, context=32, layers=2, heads=8, hidden=96),
        UNetConfig(in_channels=3, channels=16, multipliers=(1, 2), blocks=1, attention_levels=(), heads=4, groups=4),
        pixels=8,
        batch={"gpt": 16, "unet": 16},
    ),
    "large": Size(
        GPTConfig(vocabulary=256, context=64, layers=6, heads=8, hidden=384),
        UNetConfig(in_channels=3, channels=48, multipliers=(1, 2), blocks=1, attention_levels=(), heads=4, groups=8),
        pixels=16,
        batch={"gpt": 16, "unet": 16},
    ),
}


def gpt_plan(sizes: GPTConfig) -> dict[str, LayerPlan]:
    """The plan of the GPT's layers on the grid."""
    return {
        **{"tokens": LayerPlan("embedding"), "positions": LayerPlan("embedding")},
        **{"*.ln?": LayerPlan("norm"), "norm": LayerPlan("norm")},
        **{"*.qkv": LayerPlan("normal", parts=3, heads=sizes.heads), "*.proj": LayerPlan("transposed")},
        **{"*.fc1": LayerPlan("normal"), "*.fc2": LayerPlan("transposed")},
        **{"head": LayerPlan("head"), "loss": LayerPlan("loss")},
    }


@dataclass(frozen=True)
class Problem:
    """The model that is trained, and its data.

    Attributes:
        build: makes the serial model, whose weights follow from torch's seed; called with a batch it gives the mean loss.
        plan: how its layers use the grid.
        checkpointed: the modules of a model that are run again in backward.
        batch: a step's whole batch, the same everywhere; floating point is float64.
        lr: highest learning rate.
    """

    build: Callable[[], nn.Module]
    plan: Mapping[str, LayerPlan]
    checkpointed: Callable[[Any], Iterable[nn.Module]]
    batch: Callable[[int], tuple[Tensor, ...]]
    lr: float


def problem(name: str, settings: Settings) -> Problem:
    """A problem by name, checked against the grid.

    Raises:
        ConfigError: it does not fit.
    """
    size = SIZES[settings.size]
    build: Callable[[], nn.Module] = (lambda: GPT(size.gpt)) if name == "gpt" else (lambda: UNet(size.unet))
    plan = gpt_plan(size.gpt) if name == "gpt" else unet_plan(size.unet)
    grid = ",".join(str(settings.grid.size(axis)) for axis in AXES)
    if size.batch[name] % settings.grid.batch:
        raise ConfigError(
            f"--grid {grid}: the batch of {size.batch[name]} does not divide by gz*gdata = {settings.grid.batch}; choose a divisor"
        )
    with torch.device("meta"):
        model = build()
    try:
        place(model, settings.grid, plan, settings.options)
    except ValueError as error:
        raise ConfigError(f"--grid {grid} does not fit the {MODELS[name][0]}: {error}") from None
    if name == "gpt":
        return Problem(
            build, plan, lambda model: model.blocks, _text(size, settings), 3e-3 if settings.size == "small" else 1e-3
        )
    return Problem(build, plan, lambda model: model.down, _noisy_images(size, settings), lr=2e-3)


def _text(size: Size, settings: Settings) -> Callable[[int], tuple[Tensor, ...]]:
    context = size.gpt.context
    corpus = data.load(None, context)
    return lambda step: corpus.batch("training", size.batch["gpt"], context, _seed(settings, step))


def _noisy_images(size: Size, settings: Settings) -> Callable[[int], tuple[Tensor, ...]]:
    signal = cosine_schedule(TIMESTEPS)

    def batch(step: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(_seed(settings, step))
        images = discs(size.batch["unet"], size.pixels, generator)
        t = torch.randint(TIMESTEPS, (len(images),), generator=generator)
        noise = torch.randn(images.shape, generator=generator, dtype=torch.float64)
        return diffuse(images, t, noise, signal), t, noise

    return batch


def _seed(settings: Settings, step: int) -> int:
    return settings.seed * 1_000_003 + step


def discs(images: int, pixels: int, generator: torch.Generator) -> Tensor:
    """Images of a soft disc of random colour, place and size on a plain ground: (images, 3, pixels, pixels), in [-1, 1]."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(images, *shape, generator=generator, dtype=torch.float64)

    ground, colour = uniform(-1, 1, 2, 3, 1, 1).unbind(1)
    at = torch.linspace(0, 1, pixels, dtype=torch.float64)
    x, y, radius = uniform(0.2, 0.8, 1, 1), uniform(0.2, 0.8, 1, 1), uniform(0.15, 0.4, 1, 1)
    distance = ((at - x) ** 2 + (at[:, None] - y) ** 2).sqrt()
    inside = torch.sigmoid((radius - distance) * 2 * pixels)[:, None]
    return ground + (colour - ground) * inside
