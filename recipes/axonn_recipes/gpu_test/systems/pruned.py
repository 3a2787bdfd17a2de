"""SAMO under DeepSpeed."""

from __future__ import annotations

from axonn_recipes.gpu_test.scale import Found, Scale
from axonn_recipes.gpu_test.systems.engines import Beside


def run(scale: Scale) -> Found:
    """Nine tenths pruned."""
    return Beside("axonn.samo, 90 % pruned", {"samo": {"sparsity": 0.9}}).run(scale)
