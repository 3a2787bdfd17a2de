"""The time of a ring on like nodes, step by step for all pieces and links at once: what `simulate` finds event by event.

In a ring each port serves one link, and messages in order, so that what waits for what is known beforehand.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from axonn_plugins.pccl.simulate import Machine

Floats = npt.NDArray[np.float64]
_LAPS = 8
"""Node after node: a step that takes as long as this many before it took on average goes on so."""


def ring_seconds(machine: Machine, nodes: int, ranks: int, block: int, pieces: int, reduces: bool) -> float:
    """Seconds of a ring over `nodes` nodes of `ranks` ranks.

    Args:
        machine: whose interface the ring has for itself.
        nodes: at least 2.
        ranks: of each node, one after the other in the ring.
        block: bytes that each rank has or gets in the end.
        pieces: which each block is passed on in.
        reduces: whether it sums what it passes on (reduce-scatter), or not (all-gather).
    """
    size, steps = block / pieces, nodes * ranks - 1
    passes = np.full(ranks, size / machine.near_bandwidth)
    passes[-1] = size / machine.nic_bandwidth
    travels = np.full(ranks, machine.near_latency)
    travels[-1] = machine.far_latency + size / machine.copy_bandwidth
    out, into, summed = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
    ready, last = np.zeros((pieces, ranks)), []
    rest = steps % ranks
    for _ in range(min(steps, 2 * _LAPS * ranks + rest)):
        gone, out = _served(ready, out, machine.overhead + passes)
        come, into = _served(gone - passes + travels, into, passes)
        ready = np.roll(come, 1, axis=1)
        if reduces:
            ready, summed = _served(ready, summed, np.full(ranks, size / machine.reduce_bandwidth))
        last.append(float(ready.max()))
    done = len(last)
    pace = 0.0 if done == steps else (last[-1] - last[-1 - _LAPS * ranks]) / (_LAPS * ranks)
    return last[-1] + (steps - done) * pace


def _served(come: Floats, free: Floats, takes: Floats) -> tuple[Floats, Floats]:
    """When ports are done with each piece, and when they are free again: first come, first served, `takes` seconds each."""
    number = np.arange(len(come))[:, None]
    waiting = come - number * takes
    waiting[0] = np.maximum(waiting[0], free)
    done = np.maximum.accumulate(waiting, axis=0) + (number + 1) * takes
    return done, done[-1]
