"""The task that is learned: the classes of images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_recipes.models.vgg import VGG, VGGConfig
from axonn_recipes.models.wide_resnet import WideResNet, WideResNetConfig
from axonn_recipes.samo_cnn.images import Images

_VALIDATED_AT_A_TIME = 256


def make(config: VGGConfig | WideResNetConfig) -> nn.Module:
    """The model of these sizes."""
    return VGG(config) if isinstance(config, VGGConfig) else WideResNet(config)


@dataclass(frozen=True)
class Classes:
    """Images drawn at random, the same for the same step on any number of ranks.

    Attributes:
        images: to draw from.
        config: sizes of the model.
        title: the model in words.
        batch: images a step, over all ranks.
        seed: of the draws.
    """

    images: Images
    config: VGGConfig | WideResNetConfig
    title: str
    batch: int
    seed: int

    metric = "accuracy"

    def build(self) -> nn.Module:  # noqa: D102
        return make(self.config)

    def batches(self, step: int, rank: int, ranks: int) -> list[tuple[Tensor, Tensor]]:  # noqa: D102
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        chosen = torch.randint(len(self.images.training), (self.batch,), generator=generator).chunk(ranks)[rank]
        return [(self.images.training[chosen], self.images.training_labels[chosen])]

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:  # noqa: D102
        return F.cross_entropy(model(inputs.to(_dtype(model))).float(), targets)

    def held_out(self, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:  # noqa: D102
        images, labels = (t[rank::ranks] for t in (self.images.validation, self.images.validation_labels))
        yield from zip(images.split(_VALIDATED_AT_A_TIME), labels.split(_VALIDATED_AT_A_TIME), strict=True)

    def score(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, int]:  # noqa: D102
        right = model(inputs.to(_dtype(model))).argmax(1) == targets
        return float(right.sum()), len(targets)

    def figure(self, mean: float) -> float:  # noqa: D102
        return mean


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype
