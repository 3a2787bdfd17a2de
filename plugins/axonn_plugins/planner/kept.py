"""The share of its weights that a stage gathers in forward and keeps for backward."""

from __future__ import annotations

import numpy as np

from axonn_plugins.planner.axonn import Floats, Grids, state_bytes
from axonn_plugins.planner.layers import Linear
from axonn_plugins.planner.model import Model, Transformer
from axonn_plugins.planner.setting import Setting
from axonn_tp.options import Options


def of_stage(model: Model, at: Grids) -> Floats:
    """Share of the layers that the fullest stage has."""
    count = sum(block.count for block in model.blocks)
    return np.ceil(count / at.depth) / count


def share_kept(model: Model, at: Grids, setting: Setting) -> Floats:
    """Share of a stage's weights that stay gathered: `Setting.keep_gathered`, or with recomputation the first layers that `Setting.cache_gathers` names.

    Args:
        model: what is trained.
        at: the grids.
        setting: how it is trained.
    """
    if not (setting.recompute and setting.cache_gathers):
        return np.full(len(at), float(setting.keep_gathered))
    most_layers, most_bytes = Options(cache_gathers=setting.cache_gathers).cached()
    stage = of_stage(model, at)
    if np.isinf(most_layers):
        whole = setting.element * stage * state_bytes(model, at, 1.0) * at.gz
        return np.minimum(most_bytes / whole, 1.0)
    counts, weights = [0.0], [0.0]
    for block in model.blocks:
        for _ in range(block.count):
            for linear in block.linears:
                counts.append(counts[-1] + matrices(model, linear))
                weights.append(weights[-1] + linear.weights)
    kept = np.interp(np.minimum(most_layers, stage * counts[-1]), counts, weights)
    return np.minimum(kept / (stage * weights[-1]), 1.0)


def matrices(model: Model, linear: Linear) -> int:
    """Layers by which a model has a linear: of gated models queries, keys and values are made apart, and so is the gate."""
    if not (isinstance(model, Transformer) and model.gated):
        return 1
    return 3 if linear.name == "qkv" else 2 if linear.name.endswith("fc1") else 1
