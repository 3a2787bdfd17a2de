"""4D parallelism in Megatron, on megatron.core alone, beside Megatron's own tensor and data parallelism."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from axonn_recipes.bench_megatron.measure import noise
from axonn_recipes.gpu_test.scale import ROUNDED, STEPS, Check, Found, Scale, Side, apart
from axonn_recipes.gpu_test.systems.grids import compared, name, usual
from axonn_recipes.gpu_test.training import multiplied, timed, utilisation
from axonn_recipes.megatron_gpt import train
from axonn_recipes.megatron_gpt.model import build
from axonn_recipes.megatron_gpt.settings import VOCABULARY, Settings
from axonn_recipes.models.gpt import GPTConfig
from axonn_tp import Grid


def run(scale: Scale) -> Found:
    """Losses and norms of Megatron's own data parallelism, in float32, on every grid; then both are timed."""
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    found = Found()
    small = _settings(scale, scale.compared, 2, "fp32")
    expected = _trained(_stock(small, 1))
    for grid in compared(scale):
        losses, norms = _trained(_ours(small, grid))
        found.checks.append(Check(f"{name(grid)}: losses", apart(losses, expected[0]), ROUNDED))
        found.checks.append(Check(f"{name(grid)}: norms", apart(norms, expected[1]), ROUNDED))
    wide = _settings(scale, scale.timed, scale.batch, "bf16")
    grid = usual(scale)
    sides = {f"axonn3d {name(grid)}": _ours(wide, grid)}
    tensor = max(size for size in range(1, scale.local + 1) if scale.local % size == wide.heads % size == 0)
    for size in dict.fromkeys((tensor, 1)):
        sides[f"Megatron, tensor={size}"] = _stock(wide, size)
    found.sides += [_timed(what, side, scale) for what, side in sides.items()]
    many = multiplied(replace(scale.timed, vocabulary=VOCABULARY))
    found.figures += [utilisation(side, scale, many) for side in found.sides]
    return found


def _settings(scale: Scale, config: GPTConfig, micro: int, precision: Any) -> Settings:
    return Settings(
        ranks=scale.ranks,
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        context=config.context,
        batch=micro * scale.ranks,
        micro_batch=micro,
        steps=STEPS,
        precision=precision,
    )


def _ours(settings: Settings, grid: Grid) -> Settings:
    return replace(settings, axonn_gx=grid.gx, axonn_gy=grid.gy, axonn_gz=grid.gz)


def _stock(settings: Settings, tensor: int) -> Settings:
    return replace(settings, tensor_model_parallel_impl="megatron", tensor_model_parallel_size=tensor)


def _started(settings: Settings) -> tuple[Any, Callable[[int], tuple[float, float]]]:
    """The model, and its step."""
    settings.check()
    train.start(settings)
    model, optimizer = build(settings)
    return model, train.Steps(settings, model, optimizer, noise(settings)).take


def _trained(settings: Settings) -> tuple[list[float], list[float]]:
    """Losses and norms of the gradient."""
    model, take = _started(settings)
    taken = [take(number) for number in range(settings.steps)]
    train.stop(settings, model)
    return [loss for loss, _ in taken], [norm for _, norm in taken]


def _timed(what: str, settings: Settings, scale: Scale) -> Side:
    models = []

    def begin() -> Callable[[], object]:
        model, take = _started(settings)
        models.append(model)
        return lambda: take(0)

    side = timed(what, settings.grid is not None, begin, scale)
    train.stop(settings, models.pop())
    return side
