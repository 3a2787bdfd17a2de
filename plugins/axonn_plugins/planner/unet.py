"""U-Nets of diffusion models in the manner of Nichol & Dhariwal, as 003 trains them, as what 4D grids split."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from axonn_plugins.config.base import ConfigError
from axonn_plugins.planner.layers import Attention, Between, Block, Kind, Linear


@dataclass(frozen=True)
class UNet:
    """Sizes of a diffusion U-Net.

    003 gives channels alone. The rest defaults to Nichol & Dhariwal's U-Net for CIFAR-10 ("Improved DDPM", 2021), which with 128 channels
    has the 50 million parameters of 003's; with 003's other channels it has 0.21, 0.55, 0.84, 1.9 and 3.4 billion.

    Attributes:
        name: what a user calls it.
        channels: features of the first level; the time embedding has four times as many.
        image: height and width in pixels; they are halved from level to level.
        multipliers: features of each level as multiples of `channels`.
        blocks_of_a_level: residual blocks on the way down; one more on the way up.
        attention_levels: levels with attention, counted from 0; the middle always has it.
        heads: of attention.
        in_channels: of the image.
        source: where the sizes come from.

    Raises:
        ConfigError: sizes that do not go together.
    """

    name: str
    channels: int
    image: int = 32
    multipliers: tuple[int, ...] = (1, 2, 2, 2)
    blocks_of_a_level: int = 3
    attention_levels: tuple[int, ...] = (1, 2)
    heads: int = 4
    in_channels: int = 3
    source: str = ""

    def __post_init__(self) -> None:
        say = f'model "{self.name}":'
        if self.channels % self.heads:
            raise ConfigError(
                f"{say} heads = {self.heads} does not divide channels = {self.channels}; choose a divisor"
            )
        shrinks = 2 ** (len(self.multipliers) - 1)
        if self.image % shrinks:
            raise ConfigError(
                f"{say} image = {self.image} cannot be halved for {len(self.multipliers)} levels; choose a multiple of {shrinks}"
            )
        far = [level for level in self.attention_levels if level >= len(self.multipliers)]
        if far:
            raise ConfigError(
                f"{say} attention_levels names level {far[0]}, but there are {len(self.multipliers)}, counted from 0"
            )

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Its parts, equal ones once.

        The two convolutions of a residual block are a pair, normal and transposed, as are attention's projections and the time
        embedding's layers. The others, which change resolution or the number of features, are normal. The time embedding's share in
        a residual block is computed once for an image.
        """
        c, last = self.channels, len(self.multipliers) - 1
        found = [self._time(), self._convolution("first", self.in_channels, c, 0)]
        widths = [c]
        for level, multiplier in enumerate(self.multipliers):
            for _ in range(self.blocks_of_a_level):
                found += self._stage(widths[-1], multiplier * c, level)
                widths.append(multiplier * c)
            if level < last:
                found.append(self._convolution("downsample", widths[-1], widths[-1], level, level + 1))
                widths.append(widths[-1])
        width = widths[-1]
        found += [self._residual(width, width, last), self._attention(width, last), self._residual(width, width, last)]
        for level in range(last, -1, -1):
            new = self.multipliers[level] * c
            for _ in range(self.blocks_of_a_level + 1):
                found += self._stage(width + widths.pop(), new, level)
                width = new
            if level:
                found.append(self._convolution("upsample", new, new, level - 1))
        between = (Between("norm", self._pixels(0), width), Between("activation", self._pixels(0), width))
        found.append(replace(self._convolution("last", width, self.in_channels, 0), between=between))
        return tuple(replace(block, count=count) for block, count in Counter(found).items())

    @property
    def parameters(self) -> int:
        """Parameters of all layers."""
        return sum(block.count * block.parameters for block in self.blocks)

    @property
    def described(self) -> str:
        """Its sizes in words."""
        return f"U-Net of {self.channels} channels x {self.multipliers}, {self.blocks_of_a_level} blocks a level, {self.heads} heads"

    @property
    def sample(self) -> str:
        """The size of a sample, in words."""
        return f"{self.image} x {self.image} pixels"

    @property
    def divides(self) -> tuple[tuple[int, ...], int]:
        """Features that gx and gy must divide, and heads that gx must."""
        return (self.channels,), self.heads

    def _pixels(self, level: int) -> int:
        return (self.image >> level) ** 2

    def _stage(self, k: int, n: int, level: int) -> list[Block]:
        return [self._residual(k, n, level), *([self._attention(n, level)] if level in self.attention_levels else [])]

    def _time(self) -> Block:
        c = self.channels
        linears = (Linear("time.fc1", c, 4 * c, False), Linear("time.fc2", 4 * c, 4 * c, True))
        return Block(linears, (Between("activation", 1, 4 * c),))

    def _convolution(self, name: str, k: int, n: int, level: int, to: int | None = None) -> Block:
        gives = self._pixels(level if to is None else to)
        return Block((Linear(name, k, n, False, self._pixels(level), gives, 9),))

    def _residual(self, k: int, n: int, level: int) -> Block:
        pixels = self._pixels(level)
        linears = [
            Linear("conv1", k, n, False, pixels, pixels, 9),
            Linear("time", 4 * self.channels, 2 * n, False),
            Linear("conv2", n, n, True, pixels, pixels, 9),
        ]
        if k != n:
            linears.append(Linear("skip", k, n, False, pixels, pixels))
        kinds: tuple[tuple[Kind, int], ...] = (
            *(("norm", k), ("activation", k)),
            *(("norm", n), ("bias", n), ("activation", n), ("dropout", n)),
        )
        return Block(tuple(linears), tuple(Between(kind, pixels, width) for kind, width in kinds))

    def _attention(self, width: int, level: int) -> Block:
        pixels = self._pixels(level)
        linears = (
            Linear("qkv", width, 3 * width, False, pixels, pixels),
            Linear("proj", width, width, True, pixels, pixels),
        )
        heads = Attention(pixels, self.heads, self.heads, width // self.heads)
        return Block(linears, (Between("norm", pixels, width),), heads)
