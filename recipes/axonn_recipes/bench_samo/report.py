"""The report of a run: tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from axonn_recipes.bench.numbers import ratios, spread
from axonn_recipes.bench.output import ms, quartiles, table
from axonn_recipes.bench_samo.measure import PLAIN, PRUNED, Side
from axonn_recipes.bench_samo.settings import Settings


def results(settings: Settings, sides: list[Side], copying: Side, passes: list[Side]) -> dict[str, Any]:
    """Everything measured, as what JSON can hold; seconds and bytes."""
    ours = [side for side in sides if side.name.startswith("samo")]
    return {
        "settings": asdict(settings),
        "device": torch.cuda.get_device_name() if settings.device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "copy": _numbers(copying),
        "sides": [_numbers(side) for side in sides],
        "ratios": [
            {"side": side.name, "over": mine.name} | spread(ratios(side.seconds, mine.seconds))
            for mine in ours
            for side in sides
            if side not in ours
        ],
        "passes": [_numbers(side) | {"compression": side.compression} for side in passes],
        "compression_share": _share(passes),
    }


def _numbers(side: Side) -> dict[str, Any]:
    speed = (
        {} if side.bytes is None else {"bytes": side.bytes, "bytes_per_s": side.bytes / statistics.median(side.seconds)}
    )
    return {"name": side.name, "seconds": side.seconds} | spread(side.seconds) | speed


def _share(passes: list[Side]) -> dict[str, float] | None:
    """Time in compression over that of a dense forward and backward of the same round."""
    by_name = {side.name: side for side in passes}
    return spread(ratios(by_name[PRUNED].compression, by_name[PLAIN].seconds)) if passes else None


def text(numbers: dict[str, Any]) -> str:
    """The tables to read: milliseconds, medians with quartiles."""
    copied = numbers["copy"]["bytes_per_s"]
    times: dict[str, Callable[[dict[str, Any]], str]] = {"ms": lambda side: ms(side["median"]), "quartiles": quartiles}
    parts = [
        table(
            {
                "step": lambda side: side["name"],
                **times,
                "MB": lambda side: f"{side['bytes'] / 1e6:,.0f}",
                "GB/s": lambda side: f"{side['bytes_per_s'] / 1e9:,.1f}",
                "of a copy": lambda side: f"{side['bytes_per_s'] / copied:.0%}",
            },
            [*numbers["sides"], numbers["copy"]],
        ),
        "\n".join(
            f"{pair['side']}: {pair['median']:.2f} times {pair['over']} ({pair['low']:.2f} to {pair['high']:.2f})"
            for pair in numbers["ratios"]
        ),
    ]
    if numbers["passes"]:
        share = numbers["compression_share"]
        parts += [
            table({"forward and backward": lambda side: side["name"], **times}, numbers["passes"]),
            f"compression: {share['median']:.2%} of a dense forward and backward ({share['low']:.2%} to {share['high']:.2%})",
        ]
    return "\n\n".join(parts)
