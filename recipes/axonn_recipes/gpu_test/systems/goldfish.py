"""The goldfish loss under DeepSpeed."""

from __future__ import annotations

from axonn_recipes.gpu_test.scale import Found, Scale
from axonn_recipes.gpu_test.systems.engines import Beside


def run(scale: Scale) -> Found:
    """One target of four left out; stock has all targets."""
    return Beside("axonn.goldfish", {"goldfish": {"k": 4, "h": 3, "labels": "targets"}}).run(scale)
