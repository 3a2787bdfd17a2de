"""The algorithms by name: pure functions from a rank's place to its program."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from axonn_plugins.pccl.algorithms.broadcast import binomial, chain
from axonn_plugins.pccl.algorithms.flat import flat
from axonn_plugins.pccl.algorithms.hierarchical import hierarchical, hierarchical_doubling
from axonn_plugins.pccl.algorithms.led import led, led_doubling
from axonn_plugins.pccl.algorithms.patterns import Pattern, bruck, direct, doubling, logarithmic, ring
from axonn_plugins.pccl.algorithms.tiny import tiny
from axonn_plugins.pccl.program import Program

Algorithm = Callable[..., Program]
"""(collective, rank, size, nodes, chunks) -> that rank's program; broadcasts take the option `root` besides.

`nodes` are the group's ranks by node, such as ((0, 1), (2, 3)); every rank of `size` is on one.
"""

BETWEEN: dict[str, Pattern] = {"ring": ring, "log": logarithmic, "radix4": partial(bruck, radix=4), "direct": direct}
"""Patterns between nodes, for "hierarchical_<between>_<within>"."""

WITHIN: dict[str, Pattern] = {"direct": direct, "ring": ring}
"""Patterns within a node."""

SCATTERING: dict[str, Algorithm] = {
    "ring": partial(flat, pattern=ring),
    "recursive": partial(flat, pattern=doubling),
    "bruck": partial(flat, pattern=bruck),
    "direct": partial(flat, pattern=direct),
    **{
        f"hierarchical_{between}_{within}": partial(hierarchical, inter=BETWEEN[between], intra=WITHIN[within])
        for between in BETWEEN
        for within in WITHIN
    },
    **{f"led_{between}": partial(led, inter=BETWEEN[between]) for between in BETWEEN},
}
"""For all_gather, reduce_scatter and all_reduce. "recursive" needs a power of two; between nodes "log" is recursive
doubling there, else Bruck's algorithm."""

REDUCING: dict[str, Algorithm] = {
    "tiny": tiny,
    "hierarchical_doubling_direct": partial(hierarchical_doubling, intra=direct),
    "led_doubling": led_doubling,
}
"""For all_reduce alone."""

SPREADING: dict[str, Algorithm] = {"binomial": binomial, "chain": chain}
"""For broadcast."""


def algorithms(collective: str, size: int) -> dict[str, Algorithm]:
    """Algorithms that can do `collective` on `size` ranks."""
    if collective == "broadcast":
        return SPREADING
    known = SCATTERING | (REDUCING if collective == "all_reduce" else {})
    return {name: make for name, make in known.items() if name != "recursive" or not size & (size - 1)}
