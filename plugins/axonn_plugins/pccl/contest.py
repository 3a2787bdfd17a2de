"""Which choices are timed for which size, in which order, and when it is enough; no communication.

Decisions rest on nothing but the nodes and on times that all ranks have agreed on, so all ranks decide alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from statistics import median_low

from axonn_plugins.pccl.algorithms import algorithms
from axonn_plugins.pccl.choice import Choice, Measured, Times

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
SIZES = (2**10, 2**14, 2**17, 2**20, 2**23)
BUDGET = 8.0
"""Seconds, shared over all collectives and sizes; one call may go beyond it."""
_TINY, _CHUNKED, _LARGE = 2**14, 2**18, 2**20  # bytes; blocks are cut above the second
_ROUNDS = 7  # two where calls are not quick
_CLOSE, _CLOSER = 1.5, 1.2  # times the best so far: worth another round; where calls are not quick
_FAR = 4.0  # times the best: not tried at the next size, as places seldom change from far off
_QUICK = 0.01  # seconds of the first call
_MANY = 512  # ranks beyond which ways in which each has to do with all others are not tried
_SMALL_PIECE = 2**12  # bytes of a node's block; with more ranks, finer cuts gain nothing and make schedules long
_TO_ALL = ("direct", "ring", "hierarchical_direct_direct")


@dataclass(frozen=True)
class Trial:
    """So many calls in a row that are to be timed together; `size` in bytes of all blocks."""

    collective: str
    size: int
    choice: Choice
    calls: int


Clock = tuple[float, float]
"""Seconds a call of the last trial, and since the beginning: those of the slowest rank."""
Trials = Generator[Trial, Clock, Measured]


def candidates(collective: str, size: int, nodes: Sequence[Sequence[int]]) -> list[Choice]:
    """Choices that come into question for `size` bytes on these nodes, the likeliest first."""
    ranks = sum(len(node) for node in nodes)
    chunked = (1, 2) if size > _CHUNKED else (1,)
    if len(nodes) == 1:
        found = [Choice("direct"), *(Choice("ring", chunks) for chunks in chunked)]
    elif all(len(node) == 1 for node in nodes):
        found = [Choice("bruck"), Choice("ring"), *(Choice("direct", chunks) for chunks in chunked)]
    elif size > _CHUNKED:
        between = ("ring", "direct") if size > _LARGE else ("log", "direct", "ring")
        found = [Choice(f"hierarchical_{pattern}_direct", chunks) for chunks in (2, 1) for pattern in between]
        rings = [Choice("ring", chunks) for chunks in ((1, 2) if collective == "all_reduce" else (1,))]
        found += [Choice("hierarchical_ring_direct", 4), *rings] if size > _LARGE else [Choice("led_log")]
    else:
        found = [Choice("led_radix4"), Choice("led_log")]
        found += [Choice(f"hierarchical_{pattern}_direct") for pattern in ("direct", "log")] + [Choice("direct")]
    if collective == "all_reduce" and size <= _CHUNKED:
        few_steps = [Choice("led_doubling"), Choice("tiny")][len(nodes) == 1 :]
        found = few_steps + found if size <= _TINY else found + few_steps
    if ranks > _MANY:
        most = size // len(nodes) // _SMALL_PIECE
        found = [choice for choice in found if choice.algorithm not in _TO_ALL and choice.chunks <= max(1, most)]
    known = algorithms(collective, ranks)
    return [choice for choice in dict.fromkeys(found) if choice.algorithm in known]


def contest(nodes: Sequence[Sequence[int]], sizes: Sequence[int] = SIZES, budget: float = BUDGET) -> Trials:
    """Yield the trial to time next, and be sent the last one's time; returns all times.

    Small sizes come first. Each gets its share of the seconds that are left, and is given up when they are spent; large
    ones are left out where two calls would take more than there is.
    """
    times: dict[str, dict[int, Times]] = {collective: {} for collective in COLLECTIVES}
    cells = [(collective, size) for size in sorted(sizes) for collective in COLLECTIVES]
    now = 0.0
    for number, (collective, size) in enumerate(cells):
        choices, left = candidates(collective, size, nodes), budget - now
        if before := times[collective]:
            smaller = max(before)
            best, growth = min(before[smaller].values()), size / smaller
            if 2 * best * growth > left:
                continue
            choices = [choice for choice in choices if before[smaller].get(choice, 0.0) <= min(growth, _FAR) * best]
        share = left * _weight(size) / sum(_weight(later) for _, later in cells[number:])
        now = yield from _rounds(collective, size, choices, now, now + share, times[collective].setdefault(size, {}))
    return Measured(
        {collective: {size: found for size, found in by.items() if found} for collective, by in times.items()}
    )


def _weight(size: int) -> float:
    return 1 + size / 2**21


def _rounds(
    collective: str, size: int, choices: Sequence[Choice], now: float, until: float, found: Times
) -> Generator[Trial, Clock, float]:
    """Put into `found` the seconds of each choice that was timed; returns what the clock then shows.

    They are the median of its rounds, the lower one of two: the least would favour what is fast once and slow at other times.
    """
    quick, rounds = True, defaultdict[Choice, list[float]](list)
    for round_ in range(_ROUNDS):
        if round_:
            best = min(found.values())
            choices = [choice for choice in choices if found[choice] <= (_CLOSE if quick else _CLOSER) * best]
            if len(choices) < 2 or (not quick and round_ > 1):
                break
        for choice in choices:
            if len(found) >= 2 and now >= until:
                return now
            calls = 1 if not quick else 3 if round_ else 2  # the first one makes memory and connections warm
            seconds, now = yield Trial(collective, size, choice, calls)
            quick = quick and (len(found) > 0 or seconds < _QUICK)
            rounds[choice].append(seconds)
            found[choice] = median_low(rounds[choice])
    return now
