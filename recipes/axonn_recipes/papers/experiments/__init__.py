"""The experiments that obtain the rows' numbers, by the names that `rows.toml` has for them."""

from __future__ import annotations

from axonn_recipes.papers.experiments import (
    collectives,
    frameworks,
    grids,
    kernels,
    measured,
    mixtures,
    pruned,
    ranks,
    roofline,
    sizes,
    stages,
)
from axonn_recipes.papers.found import Experiment

EXPERIMENTS: dict[str, Experiment] = {}
for _one in (roofline, grids, frameworks, stages, pruned, mixtures, collectives, sizes, kernels, measured, ranks):
    EXPERIMENTS |= _one.EXPERIMENTS
