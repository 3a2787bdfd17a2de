"""VGG-19 (Simonyan and Zisserman, arXiv 1409.1556, configuration E) in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))


@dataclass(frozen=True)
class VGGConfig:
    """Sizes; by default the paper's, for images of 224 x 224: 143,667,240 parameters.

    Attributes:
        classes: of images.
        channels: of an image.
        width: by what the convolutions' channels are multiplied.
        hidden: features of the two hidden linear layers.
        pooled: pixels along a side that the linear layers see.
        norm: batch norm behind each convolution, with which it also learns quickly from scratch.
        dropout: behind the hidden linear layers.
    """

    classes: int = 1000
    channels: int = 3
    width: float = 1.0
    hidden: int = 4096
    pooled: int = 7
    norm: bool = False
    dropout: float = 0.5


class VGG(nn.Module):
    """Sixteen 3x3 convolutions in five stages, each ended by a pooling, and three linear layers.

    Args:
        config: sizes.
    """

    def __init__(self, config: VGGConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        features = config.channels
        for channels, depth in _STAGES:
            out = max(round(channels * config.width), 1)
            for _ in range(depth):
                layers.append(nn.Conv2d(features, out, 3, padding=1, bias=not config.norm))
                layers += [nn.BatchNorm2d(out)] if config.norm else []
                layers.append(nn.ReLU(inplace=True))
                features = out
            layers.append(nn.MaxPool2d(2))
        self.convolutions = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(config.pooled))
        inputs, hidden = features * config.pooled**2, config.hidden
        self.classifier = nn.Sequential(
            *(nn.Linear(inputs, hidden), nn.ReLU(inplace=True), nn.Dropout(config.dropout)),
            *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(config.dropout)),
            nn.Linear(hidden, config.classes),
        )
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)) and module.weight.device.type != "meta":
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, channels, height, width), sides of 32 pixels at least, to logits (batch, classes)."""
        return self.classifier(torch.flatten(self.convolutions(images), 1))
