"""Wide residual networks (Zagoruyko and Komodakis, arXiv 1605.07146) of bottleneck blocks, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

_EXPANSION = 4


@dataclass(frozen=True)
class WideResNetConfig:
    """Sizes; by default those of WideResnet-101 for images of 224 x 224, bottlenecks twice as wide: 126,886,696 parameters.

    Attributes:
        classes: of images.
        channels: of an image.
        depths: blocks of each stage.
        base: channels of the stem, and of the first stage's bottlenecks before they are widened.
        widen: by what the bottlenecks are wider than those of a ResNet.
        small: for small images: a 3x3 stem that keeps their size.
    """

    classes: int = 1000
    channels: int = 3
    depths: tuple[int, ...] = (3, 4, 23, 3)
    base: int = 64
    widen: float = 2.0
    small: bool = False


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with batch norm, added to their input."""

    def __init__(self, inputs: int, channels: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = channels * _EXPANSION
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        out = F.relu(self.norm1(self.conv1(x)))
        out = F.relu(self.norm2(self.conv2(out)))
        return F.relu(self.norm3(self.conv3(out)) + self.shortcut(x))


class WideResNet(nn.Module):
    """A stem, stages of bottlenecks, of which each but the first halves the image, and a linear layer.

    Args:
        config: sizes.
    """

    def __init__(self, config: WideResNetConfig) -> None:
        super().__init__()
        size, stride = (3, 1) if config.small else (7, 2)
        self.stem = nn.Sequential(
            nn.Conv2d(config.channels, config.base, size, stride, padding=size // 2, bias=False),
            nn.BatchNorm2d(config.base),
            nn.ReLU(inplace=True),
            *(() if config.small else (nn.MaxPool2d(3, 2, padding=1),)),
        )
        blocks: list[nn.Module] = []
        features = config.base
        for stage, depth in enumerate(config.depths):
            channels = config.base * 2**stage
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(Bottleneck(features, channels, round(channels * config.widen), stride))
                features = channels * _EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(features, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, channels, height, width) to logits (batch, classes)."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))
