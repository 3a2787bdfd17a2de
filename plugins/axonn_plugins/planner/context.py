"""Attention where neighbouring ranks share a sequence (context parallelism): seconds beyond those of its products, by each way.

Each rank has an equal share of the positions, dealt out so that causal attention is balanced (zigzag). By gathering, all keys and values
come before attention and again before its backward, and gradients are summed where they belong: nothing hides them (Llama 3, arXiv
2407.21783, section 3.3.2). By a ring, a neighbour's share comes beside attention to the one before (Liu et al. 2023, arXiv
2310.01889): the same bytes, of which compute hides its share, and a sum of partial outputs at each step. By heads, each rank gets all
positions of some heads, also of queries, and gives outputs back (DeepSpeed-Ulysses, arXiv 2309.14509); gradients go the same ways, and nothing hides them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from axonn_plugins.planner.axonn import Floats, Grids, bandwidths
from axonn_plugins.planner.compute import attended, head_ranks
from axonn_plugins.planner.layers import Attention
from axonn_plugins.planner.machine import Machine
from axonn_plugins.planner.rates import spent
from axonn_plugins.planner.work import Number

Way = Literal["gather", "ring", "heads"]
WAYS: tuple[Way, ...] = ("gather", "ring", "heads")
_MERGED = 4 + 4 + 2
"""Bytes of an element of a partial output: the sum so far is read and written in float32, the new part read."""


@dataclass(frozen=True)
class Shares:
    """One layer's attention over ranks that share a sequence; arrays are of candidates.

    Attributes:
        ranks: that share it.
        own: bytes of one rank's keys and values, or of the latent that they are made of.
        rate: bytes a second from a rank to the next.
        hop: seconds of a message besides.
        forward: seconds of a rank's attention.
        backward: likewise.
        outputs: elements of a rank's output.
        dealt: bytes of one rank's queries and outputs, and keys and values as often as heads are dealt out; infinite where these do not divide.
    """

    ranks: Number
    own: Number
    rate: Number
    hop: Number
    forward: Number
    backward: Number
    outputs: Number
    dealt: Number = np.inf


def seconds(machine: Machine, of: Shares, way: Way) -> tuple[Number, Number]:
    """Seconds that sharing adds to a layer's forward and to its backward, in which keys and values come again and their gradients go back.

    Args:
        machine: a calibrated one says what compute may hide; else all.
        of: the layer.
        way: how keys and values travel.
    """
    others = of.ranks - 1
    if way == "heads":  # two messages to each
        both = np.where(others > 0, np.maximum(others, 1) * (of.dealt / of.ranks / of.rate + 2 * of.hop), 0.0)
        return both, both
    once, twice = of.own / of.rate + of.hop, 2 * (of.own / of.rate + of.hop)
    if way == "gather":
        return others * once, others * twice
    hides = 1.0 if machine.calibration is None else machine.calibration.hidden
    merge = np.where(of.ranks > 1, sum(spent(machine, "vector", 2 * of.outputs, _MERGED * of.outputs)), 0.0)
    found = [
        others * (sent - np.minimum(hides * sent, attended / of.ranks))
        for sent, attended in ((once, of.forward), (twice, of.backward))
    ]
    return found[0] + others * merge, found[1]


def cheaper(machine: Machine, of: Shares) -> tuple[Number, Number]:
    """The same by the cheapest way of each candidate."""
    forward, backward = np.where(np.asarray(of.ranks) > 1, np.inf, 0.0), 0.0 * np.asarray(of.ranks)
    for way in WAYS:
        found = seconds(machine, of, way)
        better = found[0] + found[1] < forward + backward
        forward, backward = np.where(better, found[0], forward), np.where(better, found[1], backward)
    return forward, backward


def own_bytes(attention: Attention, at: Grids, samples: Floats) -> Floats:
    """Bytes of a GPU's keys and values of its positions, or of the latent that they are made of, which lies split over x."""
    if attention.latent:
        return 2 * samples * attention.positions * attention.latent / at.gx
    heads = np.maximum(attention.kv_heads / head_ranks(attention, at), 1)
    return 2 * samples * attention.positions * heads * (attention.width + (attention.value_width or attention.width))


def _dealt_bytes(attention: Attention, at: Grids, samples: Floats) -> Floats:
    """`Shares.dealt`. What travels of a latent is the latent."""
    ranks = head_ranks(attention, at)
    heads, keys = attention.heads / ranks, np.maximum(attention.kv_heads // ranks, 1)
    repeated = np.lcm(keys.astype(np.int64), at.sequence.astype(np.int64))
    features = attention.width + (attention.value_width or attention.width)
    found = 2 * samples * attention.positions * (heads + repeated) * features
    return np.where((heads % at.sequence == 0) & (not attention.latent), found, np.inf)


def sharing(machine: Machine, attention: Attention, at: Grids, samples: Floats) -> tuple[Number, Number]:
    """Seconds that ranks which share samples add to attention's forward and backward of a micro-batch: neighbours, the innermost of z."""
    apart = Grids(at.gx, at.gy, at.sequence, at.gz // at.sequence * at.gdata)
    far = at.gx * at.gy * at.sequence > machine.domain
    done, heads = attended(machine, attention, at, samples), head_ranks(attention, at)
    rows = samples * attention.positions
    of = Shares(
        ranks=at.sequence,
        own=own_bytes(attention, at, samples),
        rate=bandwidths(machine, apart).z,
        hop=np.where(far, machine.slow_latency, machine.fast_latency) + machine.call,
        forward=sum(spent(machine, "attention", done.flops, done.moved)),
        backward=sum(spent(machine, "attention", done.backward_flops, done.backward_moved, True)),
        outputs=rows * attention.heads * (attention.value_width or attention.width) / heads,
        dealt=_dealt_bytes(attention, at, samples),
    )
    forward, backward = cheaper(machine, of)
    if attention.latent:  # each makes keys and values of all others' latent, too
        again = 2 * (at.sequence - 1) * rows * attention.rebuilt / heads
        forward = forward + np.where(again > 0, spent(machine, "tensor", again, 0.0)[0], 0.0)
        backward = backward + np.where(again > 0, spent(machine, "tensor", 2 * again, 0.0, True)[0], 0.0)
    return forward, backward
