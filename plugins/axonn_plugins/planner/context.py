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
import numpy.typing as npt

from axonn_plugins.planner.axonn import Floats, Grids, bandwidths
from axonn_plugins.planner.compute import attended, head_ranks
from axonn_plugins.planner.layers import Attention
from axonn_plugins.planner.machine import Machine
from axonn_plugins.planner.rates import in_precision, spent
from axonn_plugins.planner.setting import Setting
from axonn_plugins.planner.work import Number

Integers = npt.NDArray[np.int64]
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


def fastest(machine: Machine, of: Shares) -> Integers:
    """The way of each candidate, by its place in `WAYS`, in which forward and backward take least."""
    took = [sum(seconds(machine, of, way)) + 0.0 * np.asarray(of.ranks) for way in WAYS]
    return np.argmin(np.stack(np.broadcast_arrays(*took)), axis=0)


def least_sent(of: Shares) -> Integers:
    """The way in which the busiest rank sends least, which `"attention": "auto"` takes (`axonn_tp.context.chunks.cheaper`).

    Of gathered keys and values causal queries see a part: who has the last of them sends half less gradients. A ring never sends less.
    """
    return np.where(2 * np.asarray(of.dealt) / of.ranks < 2.5 * np.asarray(of.own), WAYS.index("heads"), 0)


def cheaper(machine: Machine, of: Shares) -> tuple[Number, Number]:
    """The same by the fastest way of each candidate."""
    return _by(machine, of, fastest(machine, of))


def _by(machine: Machine, of: Shares, ways: Integers) -> tuple[Number, Number]:
    took = [seconds(machine, of, way) for way in WAYS]
    alone = np.asarray(of.ranks) == 1
    forward, backward = (np.where(alone, 0.0, np.choose(ways, [one[i] for one in took])) for i in range(2))
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


def sharing(
    machine: Machine, attention: Attention, at: Grids, samples: Floats, way: str | None = None
) -> tuple[Number, Number]:
    """Seconds that ranks which share samples add to attention's forward and backward of a micro-batch: neighbours, the innermost of z.

    Args:
        machine: where it runs.
        attention: of a layer.
        at: the grids.
        samples: of a micro-batch, on one GPU's share of z and data.
        way: see `Setting.sharing`.
    """
    of = _shares(machine, attention, at, samples)
    forward, backward = _by(machine, of, _ways(machine, of, way))
    if attention.latent:  # each makes keys and values of all others' latent, too
        again = 2 * (at.sequence - 1) * samples * attention.positions * attention.rebuilt / head_ranks(attention, at)
        forward = forward + np.where(again > 0, spent(machine, "tensor", again, 0.0)[0], 0.0)
        backward = backward + np.where(again > 0, spent(machine, "tensor", 2 * again, 0.0, True)[0], 0.0)
    return forward, backward


def room(machine: Machine | None, attention: Attention, at: Grids, samples: Floats, setting: Setting) -> Floats:
    """Bytes of what comes of others in a layer's attention, and goes back as gradients.

    Gathered, these are all keys and values; of a ring, a neighbour's and the next one's; by heads, all that is dealt out.

    Args:
        machine: where it runs; None: they are gathered.
        attention: of a layer.
        at: the grids.
        samples: see `sharing`.
        setting: which way they go.
    """
    own, others = own_bytes(attention, at, samples), at.sequence - 1
    if machine is None or not others.any():
        return 2 * others * own
    of = _shares(machine, attention, at, samples)
    each = 2 * others * own, 2 * np.minimum(others, 2) * own, np.where(others > 0, of.dealt, 0.0)
    return np.choose(_ways(in_precision(machine, setting), of, setting.sharing), each)


def way_of(machine: Machine, attention: Attention, at: Grids, samples: Floats) -> Way:
    """The fastest way of one grid."""
    return WAYS[int(fastest(machine, _shares(machine, attention, at, samples))[0])]


def _ways(machine: Machine, of: Shares, way: str | None) -> Integers:
    if way is None:
        return fastest(machine, of)
    return least_sent(of) if way == "auto" else np.full(np.shape(of.ranks), WAYS.index(way))


def _shares(machine: Machine, attention: Attention, at: Grids, samples: Floats) -> Shares:
    apart = Grids(at.gx, at.gy, at.sequence, at.gz // at.sequence * at.gdata)
    far = at.gx * at.gy * at.sequence > machine.domain
    done, heads = attended(machine, attention, at, samples), head_ranks(attention, at)
    return Shares(
        ranks=at.sequence,
        own=own_bytes(attention, at, samples),
        rate=bandwidths(machine, apart).z,
        hop=np.where(far, machine.slow_latency, machine.fast_latency) + machine.call,
        forward=sum(spent(machine, "attention", done.flops, done.moved)),
        backward=sum(spent(machine, "attention", done.backward_flops, done.backward_moved, True)),
        outputs=samples * attention.positions * attention.heads * (attention.value_width or attention.width) / heads,
        dealt=_dealt_bytes(attention, at, samples),
    )
