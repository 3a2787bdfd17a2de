"""The report of a run: a table, and the best of the peers over the best of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axonn_recipes.bench.numbers import ratio
from axonn_recipes.bench.output import compared
from axonn_recipes.bench_all.settings import OURS, Settings
from axonn_recipes.bench_tp.measure import Side
from axonn_recipes.bench_tp.report import brief, brief_text


def results(settings: Settings, sides: Sequence[Side]) -> dict[str, Any]:
    """Everything measured, as what JSON can hold; the best side of each host over our best, round by round."""
    best: dict[str, Side] = {}
    for side, way in zip(sides, settings.ways, strict=True):
        if way.host not in best or side.median < best[way.host].median:
            best[way.host] = side
    ours = best.pop(OURS)
    pairs = [
        {"host": host, "peer": peer.name, "ours": ours.name, **ratio(peer.seconds, ours.seconds)}
        for host, peer in best.items()
    ]
    return {**brief(settings, list(sides)), "best": pairs}


def text(numbers: dict[str, Any]) -> str:
    """The numbers to read."""
    lines = [f"{pair['peer']} / {pair['ours']}: {compared(pair)}" for pair in numbers["best"]]
    return "\n".join([brief_text(numbers), "", "the fastest of each host over our fastest, round by round", *lines])
