"""Collectives that are compared with what formulas say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from axonn_tp import Collective


def joined_over_z(collectives: Iterable[Collective]) -> list[Collective]:
    """The collectives, in one order, of which gathers of weights over z, and sums of their gradients, are one: small ones share calls."""
    found, elements = [], Counter[Collective]()
    for each in collectives:
        if (each.op, each.axis) in (("all_gather", "z"), ("reduce_scatter", "z")):
            elements[replace(each, elements=0)] += each.elements
        else:
            found.append(each)
    found += [replace(each, elements=count) for each, count in elements.items()]
    return sorted(found, key=str)
