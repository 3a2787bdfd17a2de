"""The networks that the benchmark trains: a GPT on random bytes, or a diffusion U-Net on noise (003, Figure 12)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from axonn_recipes.cluster_run import ClusterRun
from axonn_recipes.models.gpt import GPT
from axonn_recipes.models.unet import UNet, UNetConfig
from axonn_recipes.models.unet_plan import unet_plan
from axonn_tp import LayerPlan

TIMESTEPS = 1000


@dataclass(frozen=True)
class Network:
    """One of them.

    Attributes:
        build: makes the serial model, which called with a batch gives the mean loss.
        batch: a step's whole batch.
        plan: what every layer becomes in 3D PMM.
        blocks: the parts of a model that FSDP2 gathers one after another.
        unit: what a step's throughput counts.
    """

    build: Callable[[ClusterRun], nn.Module]
    batch: Callable[[ClusterRun, torch.Generator], list[Tensor]]
    plan: Callable[[ClusterRun], dict[str, LayerPlan]]
    blocks: Callable[[Any], Iterable[nn.Module]]
    unit: str


def _text(run: ClusterRun, generator: torch.Generator) -> list[Tensor]:
    windows = torch.randint(256, (run.batch, run.context + 1), generator=generator)
    return [windows[:, :-1], windows[:, 1:]]


def _gpt_plan(run: ClusterRun) -> dict[str, LayerPlan]:
    return {
        **{"tokens": LayerPlan("embedding"), "positions": LayerPlan("embedding")},
        **{"*.ln?": LayerPlan("norm"), "norm": LayerPlan("norm")},
        **{"*.qkv": LayerPlan("normal", parts=3, heads=run.heads), "*.proj": LayerPlan("transposed")},
        **{"*.fc1": LayerPlan("normal"), "*.fc2": LayerPlan("transposed")},
        **{"head": LayerPlan("head"), "loss": LayerPlan("loss")},
    }


def unet_sizes(run: ClusterRun) -> UNetConfig:
    """A U-Net of three levels: channels are `hidden`, residual blocks of a level `layers`; images have `context` pixels a side."""
    return UNetConfig(
        channels=run.hidden,
        multipliers=(1, 2, 2),
        blocks=run.layers,
        attention_levels=(1,),
        heads=run.heads,
        groups=run.heads,
        zero_init=False,
    )


def _noise(run: ClusterRun, generator: torch.Generator) -> list[Tensor]:
    images, noise = torch.randn(2, run.batch, 3, run.context, run.context, generator=generator)
    return [images + noise, torch.randint(TIMESTEPS, (run.batch,), generator=generator), noise]


NETWORKS = {
    "gpt": Network(lambda run: GPT(run.model), _text, _gpt_plan, lambda model: model.blocks, "tokens"),
    "unet": Network(
        lambda run: UNet(unet_sizes(run)),
        _noise,
        lambda run: unet_plan(unet_sizes(run)),
        lambda model: [*model.down, model.middle1, model.middle2, *model.up],
        "images",
    ),
}
