"""A system of a user's own, as docs/design.md shows it: noise on gradients."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from pydantic import Field
from torch import Tensor

from axonn_plugins.config.base import Block
from axonn_plugins.hosts.host import Gradient, System
from axonn_tp import layout_of


class NoiseBlock(Block):
    """Gaussian noise on gradients, less with each step (Neelakantan et al., arXiv 1511.06807)."""

    std: float = Field(gt=0, description="Standard deviation in the first step.")
    decay: float = Field(0.55, description="It falls with this power of the steps.")


class GradientNoise(System, key="gradient_noise"):
    """Adds the same noise to a gradient on any grid."""

    Block = NoiseBlock

    def gradients(self, gradients: Iterable[Gradient]) -> None:
        """Noise is drawn for the serial parameter, of which each rank takes its part."""
        for gradient in gradients:
            noise = self.draw(gradient.name, layout_of(gradient.parameter).serial_shape, self.host.steps)
            gradient.values.add_(gradient.part_of(noise).to(gradient.values) * gradient.scale)

    def draw(self, name: str, shape: tuple[int, ...], steps: int) -> Tensor:
        """The noise of one parameter in one step."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {steps}".encode()))
        std = self.block.std / (1 + steps) ** self.block.decay
        return std * torch.randn(shape, generator=generator, dtype=torch.float64)
