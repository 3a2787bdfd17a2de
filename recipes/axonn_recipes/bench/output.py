"""The output of a run: the table, results.json and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from axonn_plugins.observe.figures import Picture
from axonn_plugins.observe.files import put

MIB = 2**20


def table(columns: Mapping[str, Callable[[Any], object]], rows: Iterable[Any]) -> str:
    """Rows as text: the first column flush left, the others right.

    Args:
        columns: by title, what a row shows there.
        rows: anything that the columns know.
    """
    return aligned([list(columns), *([str(show(row)) for show in columns.values()] for row in rows)])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Cells as text, as `table` has them."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def ms(seconds: float) -> str:
    """Milliseconds in three digits or more."""
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def mib(count: float | None, digits: int = 1) -> str:
    """Bytes in MiB; a dash for what was not measured."""
    return "-" if count is None else f"{count / MIB:,.{digits}f}"


def quartiles(found: Mapping[str, Any], show: Callable[[float], str] = ms) -> str:
    """The quartiles of a spread, as in 1.2-1.4."""
    return f"{show(found['low'])}-{show(found['high'])}"


def extremes(values: Sequence[float], show: Callable[[float], str] = ms) -> str:
    """The least and the most, as in 1.2-1.4."""
    return f"{show(min(values))}-{show(max(values))}"


def two(number: float) -> str:
    """With two decimals."""
    return f"{number:.2f}"


def three(number: float) -> str:
    """With three decimals."""
    return f"{number:.3f}"


def compared(found: Mapping[str, Any]) -> str:
    """A ratio of `axonn_recipes.bench.numbers` in words."""
    (low, high), (least, most) = found["quartiles"], found["range"]
    return f"{found['median']:.2f} (quartiles {low:.2f}-{high:.2f}, range {least:.2f}-{most:.2f})"


def judged(found: Mapping[str, Any], bar: float, show: Callable[[float], str] = two) -> str:
    """A spread beside what was asked of its median."""
    verdict = "met" if found["median"] >= bar else "not met"
    return f"{show(found['median'])} (quartiles {show(found['low'])} to {show(found['high'])}; asked: {show(bar)}, {verdict})"


def publish(folder: Path, numbers: Any, text: str, pictures: Mapping[str, Picture] | None = None) -> list[Path]:
    """Print a run's table, and `write`."""
    print(text, end="\n\n")
    return write(folder, numbers, text, pictures)


def write(folder: Path, numbers: Any, text: str, pictures: Mapping[str, Picture] | None = None) -> list[Path]:
    """Write a run's numbers, table and pictures into its folder, and say where they are.

    Args:
        folder: the run's.
        numbers: results.json.
        text: table.txt.
        pictures: by file name.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {"results.json": json.dumps(numbers, indent=1), "table.txt": text}
    for name, content in files.items():
        put(folder / name, content + "\n")
    written = [folder / name for name in files]
    for name, picture in (pictures or {}).items():
        written += picture.save(folder / name)
    print(*written, sep="\n")
    return written
