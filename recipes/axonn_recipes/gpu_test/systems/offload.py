"""Optimizer states in host memory under DeepSpeed."""

from __future__ import annotations

from axonn_recipes.gpu_test.scale import Found, Scale
from axonn_recipes.gpu_test.systems.engines import Beside


def run(scale: Scale) -> Found:
    """States in host memory; stock's step is torch's, on the CPU."""
    there = {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": scale.device == "cuda"}}
    return Beside("axonn.offload_optimizer", {"offload_optimizer": {}}, {"zero_optimization": there}).run(scale)
