"""A diffusion U-Net in plain PyTorch, in the manner of Nichol & Dhariwal ("Improved DDPM", "Guided diffusion").

Residual blocks that the time embedding scales and shifts, attention at chosen levels, skip connections by
concatenation. It knows nothing of parallelism: widths are read from the tensors, never from the configuration, so that
the same code runs on a share of the channels and heads. Every module initialises itself in `reset_parameters`.

Shapes: B images, C channels, H × W pixels, T features of the time embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class UNetConfig:
    """Sizes of a U-Net.

    Attributes:
        in_channels: channels of the image.
        channels: features of the first level; the time embedding has four times as many.
        multipliers: features of each level as multiples of `channels`; between levels H and W are halved.
        blocks: residual blocks of a level on the way down; one more on the way up.
        attention_levels: levels with attention, counted from 0; the middle always has it.
        heads: attention heads.
        groups: groups of every GroupNorm.
        dropout: probability, in residual blocks.
        zero_init: last layers of residual blocks, of attention and of the network start at zero, as published.

    Raises:
        ValueError: names the field and the value.
    """

    in_channels: int = 3
    channels: int = 128
    multipliers: tuple[int, ...] = (1, 2, 2, 2)
    blocks: int = 2
    attention_levels: tuple[int, ...] = (2, 3)
    heads: int = 4
    groups: int = 32
    dropout: float = 0.0
    zero_init: bool = True

    def __post_init__(self) -> None:
        for level, multiplier in enumerate(self.multipliers):
            width = multiplier * self.channels
            if width % self.groups:
                raise ValueError(
                    f"groups = {self.groups} does not divide the {width} features of level {level}; choose a divisor"
                )
            if width % self.heads:
                raise ValueError(
                    f"heads = {self.heads} does not divide the {width} features of level {level}; choose a divisor"
                )
        unknown = [level for level in self.attention_levels if not 0 <= level < len(self.multipliers)]
        if unknown:
            raise ValueError(
                f"attention_levels = {self.attention_levels} names level {unknown[0]}, but there are {len(self.multipliers)}; "
                f"use 0 to {len(self.multipliers) - 1}"
            )


class Conv2d(nn.Conv2d):
    """`nn.Conv2d` whose weight may start at zero."""

    def __init__(self, k: int, n: int, size: int = 3, stride: int = 1, zero: bool = False) -> None:
        self.zero = zero
        super().__init__(k, n, size, stride, padding=size // 2)

    def reset_parameters(self) -> None:
        """Zeros, or torch's initialisation."""
        super().reset_parameters()
        if self.zero:
            nn.init.zeros_(self.weight)
            nn.init.zeros_(self.bias)  # type: ignore[arg-type]


class Linear(nn.Linear):
    """`nn.Linear` whose weight may start at zero."""

    def __init__(self, k: int, n: int, zero: bool = False) -> None:
        self.zero = zero
        super().__init__(k, n)

    def reset_parameters(self) -> None:
        """Zeros, or torch's initialisation."""
        super().reset_parameters()
        if self.zero:
            nn.init.zeros_(self.weight)
            nn.init.zeros_(self.bias)


class TimeEmbedding(nn.Module):
    """Timesteps (B) → (B, T): sines and cosines of geometric frequencies, then two layers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.fc1 = nn.Linear(channels, 4 * channels)
        self.fc2 = nn.Linear(4 * channels, 4 * channels)

    def forward(self, t: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: D102
        half = self.channels // 2
        frequencies = torch.exp(-math.log(10000.0) / half * torch.arange(half, device=t.device, dtype=torch.float64))
        angles = t[:, None].double() * frequencies
        waves = F.pad(torch.cat([angles.cos(), angles.sin()], -1), (0, self.channels % 2))
        return self.fc2(F.silu(self.fc1(waves.to(dtype))))


class ResBlock(nn.Module):
    """(B, k, H, W) and the time embedding (B, T) → (B, n, H, W)."""

    def __init__(self, k: int, n: int, config: UNetConfig) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(config.groups, k)
        self.conv1 = Conv2d(k, n)
        self.time = nn.Linear(4 * config.channels, 2 * n)
        self.norm2 = nn.GroupNorm(config.groups, n)
        self.dropout = nn.Dropout(config.dropout)
        self.conv2 = Conv2d(n, n, zero=config.zero_init)
        self.skip = nn.Identity() if k == n else Conv2d(k, n, 1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:  # noqa: D102
        hidden = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(embedding))[..., None, None].chunk(2, dim=1)
        hidden = self.norm2(hidden) * (1 + scale) + shift
        return self.skip(x) + self.conv2(self.dropout(F.silu(hidden)))


class Attention(nn.Module):
    """Self-attention among all pixels, (B, C, H, W) → the same."""

    def __init__(self, channels: int, config: UNetConfig) -> None:
        super().__init__()
        self.head_size = channels // config.heads
        self.norm = nn.GroupNorm(config.groups, channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = Linear(channels, channels, zero=config.zero_init)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (t.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for t in self.qkv(pixels).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.proj(attended).transpose(1, 2).unflatten(-1, x.shape[2:])


class Downsample(nn.Module):
    """Halves H and W by a convolution of stride 2."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = Conv2d(channels, channels, stride=2)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.conv(x)


class Upsample(nn.Module):
    """Doubles H and W: nearest pixel, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = Conv2d(channels, channels)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


class Stage(nn.Module):
    """A residual block, attention where the level has it, and a change of resolution where the level ends."""

    def __init__(self, block: ResBlock, attention: Attention | None, resample: nn.Module | None = None) -> None:
        super().__init__()
        self.block, self.attention, self.resample = block, attention, resample

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:  # noqa: D102
        x = self.block(x, embedding)
        if self.attention is not None:
            x = self.attention(x)
        return x if self.resample is None else self.resample(x)


class UNet(nn.Module):
    """Predicts the noise in an image.

    Args:
        config: sizes.
    """

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        self.time = TimeEmbedding(config.channels)
        self.first = Conv2d(config.in_channels, config.channels)
        widths = [config.channels]
        self.down, self.downsample = nn.ModuleList(), nn.ModuleList()
        last = len(config.multipliers) - 1
        for level, multiplier in enumerate(config.multipliers):
            for _ in range(config.blocks):
                self.down.append(self._stage(widths[-1], multiplier * config.channels, level))
                widths.append(multiplier * config.channels)
            if level < last:
                self.downsample.append(Downsample(widths[-1]))
                widths.append(widths[-1])
        width = widths[-1]
        self.middle1 = Stage(ResBlock(width, width, config), Attention(width, config))
        self.middle2 = Stage(ResBlock(width, width, config), None)
        self.up = nn.ModuleList()
        for level in range(last, -1, -1):
            new = config.multipliers[level] * config.channels
            for block in range(config.blocks + 1):
                grow = Upsample(new) if level and block == config.blocks else None
                self.up.append(self._stage(width + widths.pop(), new, level, grow))
                width = new
        self.norm = nn.GroupNorm(config.groups, width)
        self.last = Conv2d(width, config.in_channels, zero=config.zero_init)

    def _stage(self, k: int, n: int, level: int, resample: nn.Module | None = None) -> Stage:
        attention = Attention(n, self.config) if level in self.config.attention_levels else None
        return Stage(ResBlock(k, n, self.config), attention, resample)

    def forward(self, x: Tensor, t: Tensor, noise: Tensor | None = None) -> Tensor:
        """The predicted noise (B, C, H, W), or its mean squared error where the noise is given.

        Args:
            x: (B, C, H, W) noisy images; H and W divide by 2 for every level but the first.
            t: (B) timesteps.
            noise: (B, C, H, W) the noise in `x`.
        """
        embedding = self.time(t, x.dtype)
        x = self.first(x)
        skips = [x]
        for index, stage in enumerate(self.down):
            x = stage(x, embedding)
            skips.append(x)
            level, block = divmod(index, self.config.blocks)
            if block == self.config.blocks - 1 and level < len(self.downsample):
                x = self.downsample[level](x)
                skips.append(x)
        x = self.middle2(self.middle1(x, embedding), embedding)
        for stage in self.up:
            x = stage(torch.cat([x, skips.pop()], dim=1), embedding)
        predicted = self.last(F.silu(self.norm(x)))
        return predicted if noise is None else F.mse_loss(predicted, noise)


def cosine_schedule(steps: int) -> Tensor:
    """Share of the signal's variance left after each of `steps` timesteps (Improved DDPM, equation 17), float64 (steps)."""
    share = torch.cos((torch.linspace(0, 1, steps + 1, dtype=torch.float64) + 0.008) / 1.008 * math.pi / 2) ** 2
    return share[1:] / share[0]


def diffuse(images: Tensor, t: Tensor, noise: Tensor, signal: Tensor) -> Tensor:
    """Images (B, C, H, W) after `t` (B) timesteps of a schedule `signal` (steps)."""
    kept = signal.to(images.device)[t][:, None, None, None]
    return (kept.sqrt() * images + (1 - kept).sqrt() * noise).to(images.dtype)
