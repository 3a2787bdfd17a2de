"""Line charts and timelines as SVG text, for pages that load nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Line = Sequence[tuple[float, float]]
COLOURS = ("#4c8dd6", "#f0a04b", "#5aae77", "#9a78c8", "#d65c6c", "#5bb5b5")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 560, 240, 64, 30, 16
LEAST = 0.02
"""A chart spans at least this share of its values."""
POINTS = 1000
"""At most so many of a line are drawn, evenly taken."""


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between two ends, 1, 2 or 5 times a power of ten apart."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * one for one in (1, 2, 5, 10) if power * one >= rough)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def chart(title: str, lines: Mapping[str, Line]) -> str:
    """A chart of lines over steps.

    Args:
        title: of the chart, with the unit.
        lines: (step, value) by name, steps rising; empty ones are left out.
    """
    shown = {name: thinned(line) for name, line in lines.items() if line}
    steps = [step for line in shown.values() for step, _ in line]
    values = [value for line in shown.values() for _, value in line]
    left, right, low, high = min(steps), max(steps), min(values), max(values)
    room = max(abs(low), abs(high)) * LEAST - (high - low)
    if room > 0 or high == low:  # rounding is no news
        low, high = low - max(room, 1e-12) / 2, high + max(room, 1e-12) / 2

    def place(step: float, value: float) -> str:
        across = (step - left) / ((right - left) or 1) * (WIDTH - LEFT - 12)
        up = (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return f"{LEFT + across:.1f},{HEIGHT - BOTTOM - up:.1f}"

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick in ticks(low, high):
        y = place(left, tick).partition(",")[2]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 12}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    for tick in ticks(left, right):
        x = place(tick, low).partition(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - 10}" text-anchor="middle">{tick:.10g}</text>')
    for number, (name, line) in enumerate(shown.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(place(step, value) for step, value in line)
        said = f"<title>{escape(name)}: {line[-1][1]:.6g} at step {line[-1][0]:g}</title>"
        if len(line) > 1:
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6">{said}</polyline>'
            )
        x, y = place(*line[-1]).split(",")
        parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}">{said}</circle>')
        if len(shown) > 1:
            parts.append(f'<text x="{LEFT + 8 + number * 110}" y="12" fill="{colour}">{escape(name)}</text>')
    return f"<figure><figcaption>{escape(title)}</figcaption>{''.join(parts)}</svg></figure>"


def thinned(line: Line) -> Line:
    """At most `POINTS` points of a line, the last among them."""
    every = -(-len(line) // POINTS)
    return [*line[: len(line) - 1 : every], line[-1]]


def timeline(rows: Mapping[str, Sequence[tuple[float, float, float, str]]]) -> str:
    """Spans of time as bars, a row for each name: (begin, end, seconds waited at its end, words)."""
    last = max((end for spans in rows.values() for _, end, _, _ in spans), default=0.0) or 1.0
    height = 26 * len(rows) + 28
    parts = [f'<svg viewBox="0 0 {2 * WIDTH} {height}" role="img" aria-label="collectives of a step over time">']
    scale = (2 * WIDTH - LEFT - 40) / last
    for number, (name, spans) in enumerate(rows.items()):
        y = 4 + number * 26
        parts.append(f'<text x="{LEFT - 6}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        for begin, end, waited, words in spans:
            said = f"<title>{escape(words)}</title>"
            for start, colour in ((begin, "#4c8dd677"), (end - waited, "#d65c6c")):
                long = (end - start) * scale
                if long > 0:
                    parts.append(
                        f'<rect x="{LEFT + start * scale:.2f}" y="{y}" width="{long:.2f}" height="20" fill="{colour}">{said}</rect>'
                    )
    for tick in ticks(0.0, last * 1e3):
        parts.append(
            f'<text x="{LEFT + tick / 1e3 * scale:.1f}" y="{height - 6}" text-anchor="middle">{tick:g} ms</text>'
        )
    return "".join([*parts, "</svg>"])
