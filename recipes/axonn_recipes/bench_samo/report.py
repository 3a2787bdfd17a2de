"""What is said of a run: a table and JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

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
            {"side": side.name, "over": mine.name} | _quartiles(_ratios(side.seconds, mine.seconds))
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
    return {"name": side.name, "seconds": side.seconds} | _quartiles(side.seconds) | speed


def _share(passes: list[Side]) -> dict[str, float] | None:
    """Time in compression over that of a dense forward and backward of the same round."""
    by_name = {side.name: side for side in passes}
    return _quartiles(_ratios(by_name[PRUNED].compression, by_name[PLAIN].seconds)) if passes else None


def _ratios(over: list[float], under: list[float]) -> list[float]:
    return [above / below for above, below in zip(over, under, strict=True)]


def _quartiles(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": median, "low": low, "high": high}


def table(numbers: dict[str, Any]) -> str:
    """The table to read: milliseconds, medians with quartiles."""
    copied = numbers["copy"]["bytes_per_s"]
    rows = [["step", "ms", "quartiles", "MB", "GB/s", "of a copy"]]
    for side in [*numbers["sides"], numbers["copy"]]:
        speed = side["bytes_per_s"]
        moved = f"{side['bytes'] / 1e6:,.0f}", f"{speed / 1e9:,.1f}", f"{speed / copied:.0%}"
        rows.append([side["name"], _ms(side["median"]), f"{_ms(side['low'])}-{_ms(side['high'])}", *moved])
    lines = [*_aligned(rows), ""]
    for pair in numbers["ratios"]:
        lines.append(
            f"{pair['side']}: {pair['median']:.2f} times {pair['over']} ({pair['low']:.2f} to {pair['high']:.2f})"
        )
    if numbers["passes"]:
        rows = [["forward and backward", "ms", "quartiles"]]
        for side in numbers["passes"]:
            rows.append([side["name"], _ms(side["median"]), f"{_ms(side['low'])}-{_ms(side['high'])}"])
        share = numbers["compression_share"]
        lines += ["", *_aligned(rows), ""]
        lines.append(
            f"compression: {share['median']:.2%} of a dense forward and backward ({share['low']:.2%} to {share['high']:.2%})"
        )
    return "\n".join(lines)


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def write(numbers: dict[str, Any], folder: Path) -> list[Path]:
    """Write results.json and table.txt into a run's folder."""
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(numbers, indent=1) + "\n")
    (folder / "table.txt").write_text(table(numbers) + "\n")
    return [folder / "results.json", folder / "table.txt"]
