"""The accounts of all ranks brought together: when each began its collectives must be known to the others of its groups."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from axonn_plugins.observe.timeline.account import PARTS, Account, Piece, account
from axonn_plugins.observe.timeline.record import Key, Recorder, cost_of_watching, nanoseconds_to_add

_ROUNDS = 9
_MACHINE = Path("/proc/sys/kernel/random/boot_id")
_DRAWN = 2000
"""Pieces of a rank that are kept, at most: shorter ones than this share of the step join their neighbours."""


def bring_together(watch: Recorder, step: int, unwatched: float | None = None) -> dict[str, Any]:
    """Account for a step on every rank; every rank calls it.

    Args:
        watch: of the step.
        step: its number.
        unwatched: seconds that a step takes without a watch, where that is known.

    Returns:
        What `axonn_plugins.observe.timeline.report` shows: by rank the parts, by axis the time in collectives, and what was done when.
    """
    ahead, apart = _clock()
    mine = {call.key: call.began - ahead for call in watch.calls}
    last: dict[Key, int] = {}
    for began in _from_all(mine):
        for key, when in began.items():
            last[key] = max(when, last.get(key, when))
    adding = {dtype: nanoseconds_to_add(dtype) for dtype in {call.dtype for call in watch.calls if call.added}}
    here = {key: when + ahead for key, when in last.items() if key in mine}
    found = account(watch, here, adding, cost_of_watching())
    ranks = _from_all(_row(found, watch, ahead))
    start = min(row["began"] for row in ranks)
    for row in ranks:
        row["began"] = (row["began"] - start) / 1e6
    return {
        "step": step,
        "unwatched_ms": None if unwatched is None else unwatched * 1e3,
        "clocks_ms": apart / 1e6,
        "ranks": ranks,
    }


def _row(found: Account, watch: Recorder, ahead: int) -> dict[str, Any]:
    began = watch.began[0]
    return {
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "step_ms": found.nanoseconds / 1e6,
        "began": began - ahead,
        "parts_ms": {part: found.parts[part] / 1e6 for part in PARTS},
        "by_axis_ms": {
            axis: {part: took / 1e6 for part, took in parts.items()} for axis, parts in found.by_axis.items()
        },
        "operators": len(watch.spans),
        "collectives": len(watch.calls),
        "pieces": [
            [round((one.began - began) / 1e6, 4), round((one.ended - began) / 1e6, 4), one.part, _words(one)]
            for one in thinned(found.pieces, found.nanoseconds // _DRAWN)
        ],
    }


def _words(piece: Piece) -> str:
    return "" if piece.call is None else f"{piece.call.op} {piece.call.axis}"


def thinned(pieces: list[Piece], least: int) -> list[Piece]:
    """Pieces in order, of which those shorter than `least` nanoseconds have joined the one before."""
    kept: list[Piece] = []
    for piece in pieces:
        same = kept and kept[-1].part == piece.part and kept[-1].call is piece.call
        if kept and (same or piece.ended - piece.began < least):
            kept[-1] = Piece(kept[-1].began, piece.ended, kept[-1].part, kept[-1].call)
        else:
            kept.append(piece)
    return kept


def _clock() -> tuple[int, int]:
    """Nanoseconds by which this rank's clock is ahead of rank 0's, and by how much that may be wrong: 0 on one machine."""
    machines = _from_all(_machine())
    if len(set(machines)) == 1:
        return 0, 0
    rounds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter_ns()
        dist.barrier()
        left = time.perf_counter_ns()
        rounds.append((left, left - began))
    others = _from_all(rounds)
    differences = [mine[0] - first[0] for mine, first in zip(rounds, others[0], strict=True)]
    apart = max(min(took for _, took in one) for one in others)
    return (0 if machines[dist.get_rank()] == machines[0] else int(statistics.median(differences))), apart


def _machine() -> str:
    return _MACHINE.read_text().strip() if _MACHINE.is_file() else str(time.get_clock_info("monotonic"))


def _from_all(mine: Any) -> list[Any]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found
