"""A batch by stage, from recorded events: its picture (000, Figure 4.3) and the split of its time (Figure 4.8)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from axonn_plugins.observe.figures import Picture
from axonn_plugins.pipeline.events import Event

PHASES = ("compute", "point-to-point", "bubble", "collective", "optimizer")
_PHASE_OF = {
    "forward": "compute",
    "backward": "compute",
    "wait": "bubble",
    "transit": "point-to-point",
    "send": "point-to-point",
    "tied": "collective",
    "reduce": "collective",
    "loss": "collective",
    "optimizer": "optimizer",
}
_COLOURS = {
    "forward": "tab:red",
    "backward": "tab:blue",
    "send": "tab:orange",
    "tied": "tab:purple",
    "reduce": "tab:green",
    "loss": "tab:gray",
    "optimizer": "tab:olive",
}


def split(events: Sequence[Event]) -> dict[str, float]:
    """Seconds of one stage's batch by phase; together they are the time from its first event's start to its last one's end.

    Bubble is a wait for a message that its sender has not sent yet, and what lies between events. Point-to-point is a wait
    for one that is under way, and packing and starting one's own; what is sent or received while a stage computes is in no
    phase, for it costs nothing. When a message was sent is known from the second one on that came back from a neighbour;
    until then a wait is bubble.

    Args:
        events: of one stage, in the order of time, not overlapping.
    """
    seconds = dict.fromkeys(PHASES, 0.0)
    if not events:
        return seconds
    for event in events:
        seconds[_PHASE_OF[event.kind]] += event.end - event.start
    whole = max(event.end for event in events) - min(event.start for event in events)
    seconds["bubble"] += max(0.0, whole - sum(seconds.values()))
    return seconds


def mean_split(stages: Sequence[Sequence[Event]]) -> dict[str, float]:
    """The mean over the stages; what a stage was not yet or no longer busy counts as bubble.

    Args:
        stages: events by stage, on one clock.
    """
    every = [event for stage in stages for event in stage]
    if not every:
        return dict.fromkeys(PHASES, 0.0)
    whole = max(event.end for event in every) - min(event.start for event in every)
    splits = [split(stage) for stage in stages]
    for one in splits:
        one["bubble"] += whole - sum(one.values())
    return {phase: sum(one[phase] for one in splits) / len(splits) for phase in PHASES}


def draw(path: Path, stages: Sequence[Sequence[Event]], title: str = "") -> list[Path]:
    """Draw a batch as Figure 4.3 does: a row for each stage, forward red and backward blue, with the microbatches' numbers.

    Args:
        path: where the picture goes.
        stages: events by stage, on one clock.
        title: above it.

    Returns:
        The path, or nothing where matplotlib is missing.
    """
    return Picture(partial(_timeline, stages, title), (11, 1.2 + 0.6 * len(stages)), 150).save(path)


def _timeline(stages: Sequence[Sequence[Event]], title: str, figure: Any) -> None:
    from matplotlib.patches import Patch

    axes = figure.subplots()
    began = min((event.start for stage in stages for event in stage), default=0.0)
    ended = max((event.end for stage in stages for event in stage), default=1.0)
    for row, stage in enumerate(stages):
        for event in stage:
            if event.kind not in _COLOURS:
                continue
            length = event.end - event.start
            left = 1e3 * (event.start - began)
            axes.barh(row, 1e3 * length, 0.8, left, color=_COLOURS[event.kind], edgecolor="white", linewidth=0.5)
            if event.microbatch >= 0 and event.kind != "send" and length > 0.012 * (ended - began):
                place = (left + 500 * length, row)
                axes.text(*place, str(event.microbatch), ha="center", va="center", fontsize=7, color="white")
    kinds = [kind for kind in _COLOURS if any(event.kind == kind for stage in stages for event in stage)]
    axes.set_yticks(range(len(stages)), [f"stage {row}" for row in range(len(stages))])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title)
    patches = [Patch(color=_COLOURS[kind], label=kind) for kind in kinds]
    axes.legend(handles=patches, ncols=len(kinds), fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.25))
