"""4D parallelism under DeepSpeed."""

from __future__ import annotations

from axonn_recipes.gpu_test.scale import Found, Scale
from axonn_recipes.gpu_test.systems.engines import Beside
from axonn_recipes.gpu_test.systems.grids import usual


def run(scale: Scale) -> Found:
    """Layers split over a node's ranks, weights shared out over nodes; with one node, both over its ranks."""
    grid = usual(scale)
    sizes = {"gx": grid.gx, "gy": grid.gy, "gz": grid.gz, "plan": "auto"}
    return Beside("axonn.tensor_parallel", {"tensor_parallel": sizes}).run(scale)
