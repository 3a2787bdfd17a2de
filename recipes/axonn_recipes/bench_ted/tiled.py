"""``python -m axonn_recipes.bench_ted.tiled``: time and temporary memory of an optimizer step, whole and in tiles.

Sides take turns within each repetition, in one process group; gradients are bf16, weights have float32 masters.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_plugins.cli.options import read
from axonn_plugins.cluster.launch import launch
from axonn_plugins.config.base import ConfigError
from axonn_recipes.allocations import most_allocated
from axonn_recipes.bench.numbers import ratios, spread
from axonn_recipes.bench.rounds import in_turns, together
from ted_moe import TiledOptimizer


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time and temporary memory of an optimizer step, whole and in tiles.

    Attributes:
        elements: elements of the model.
        layers: matrices they are in.
        tile_size: elements of a tile.
        stage: of ZeRO.
        ranks: processes.
        steps: repetitions.
    """

    elements: int = 16_000_000
    layers: int = 4
    tile_size: int = 1_800_000
    stage: Literal[1, 2] = 1
    ranks: int = 2
    steps: int = 15


@dataclass
class Side:
    """One way to step.

    Attributes:
        name: shown.
        prepare: makes the gradients.
        step: what is timed.
        seconds: of each step.
        peak: bytes that a step allocated above what there was.
    """

    name: str
    prepare: Callable[[], Any]
    step: Callable[[], Any]
    seconds: list[float] = field(default_factory=list)
    peak: int = 0


class Weights(nn.Module):
    """Square matrices, whose gradients cost next to nothing."""

    def __init__(self, elements: int, layers: int) -> None:
        super().__init__()
        width = int((elements / layers) ** 0.5)
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(width, width)) for _ in range(layers))

    def forward(self) -> Tensor:
        """A loss."""
        return torch.stack([layer.sum() for layer in self.layers]).sum().float()


def _adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-4)


def _plain(options: Options) -> list[Side]:
    def gradients(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)

    whole, tiled = (Weights(options.elements, options.layers).bfloat16() for _ in range(2))
    masters = [p.detach().float() for p in whole.parameters()]
    untiled = _adamw(masters)

    @torch.no_grad()
    def step() -> None:
        for parameter, master in zip(whole.parameters(), masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        untiled.step()
        for parameter, master in zip(whole.parameters(), masters, strict=True):
            parameter.copy_(master)
            master.grad = None

    optimizer = TiledOptimizer(_adamw, tiled.parameters(), options.tile_size)
    return [
        Side("torch, whole", lambda: gradients(whole), step),
        Side("torch, tiled", lambda: gradients(tiled), optimizer.step),
    ]


def _zero(options: Options) -> list[Side]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    import axonn_plugins

    axonn_plugins.activate()
    sides = []
    for name, block in (("whole", {}), ("tiled", {"axonn": {"ted": {"tile_size": options.tile_size}}})):
        model = Weights(options.elements, options.layers)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": options.stage, "reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6},
            **block,
        }
        engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
        backward = lambda engine=engine: engine.backward(engine())  # noqa: E731
        sides.append(Side(f"ZeRO-{options.stage}, {name}", backward, engine.step))
    return sides


def _rank(options: Options) -> list[tuple[str, list[float], int]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sides = _plain(options) + _zero(options)
    for side in sides:
        for _ in range(2):
            side.prepare()
            side.step()
        side.prepare()
        side.peak = most_allocated(side.step)
    for _, side in in_turns(sides, options.steps):
        side.prepare()
        side.seconds.append(together(side.step))
    dist.barrier()
    dist.destroy_process_group()
    return [(side.name, side.seconds, side.peak) for side in sides]


def main(arguments: list[str]) -> int:
    """Measure and print; returns the exit code."""
    options = read(Options, arguments, "python -m axonn_recipes.bench_ted.tiled")
    measured = launch(_rank, options.ranks, options)[0]
    limit = 4 * options.tile_size + 2**20
    print(f"4 * tile + 1 MiB = {limit / 2**20:.1f} MiB")
    for whole, tiled in (measured[:2], measured[2:]):
        speed = spread(ratios(whole[1], tiled[1]))
        for name, seconds, peak in (whole, tiled):
            print(f"{name:<16} {1e3 * statistics.median(seconds):8.1f} ms a step {peak / 2**20:8.1f} MiB temporary")
        print(
            f"{'speed, tiled':<16} {speed['median']:8.3f} of whole, quartiles {speed['low']:.3f} to {speed['high']:.3f}"
        )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
