"""AxoNN's 4D algorithm, 3D parallel matrix multiplication × data, for any PyTorch model.

Sources: dissertation chapter 5; "Democratizing AI" (the Gordon Bell paper); "A 4D Hybrid Algorithm".
"""

from axonn_tp.checkpoint import full_state_dict
from axonn_tp.comm.collectives import Collective
from axonn_tp.comm.grad_scaler import GradScaler
from axonn_tp.comm.gradients import clip_grad_norm_, global_square, grad_norm, sum_ranks, sync_gradients
from axonn_tp.comm.reducer import GradientReducer
from axonn_tp.grid.layout import Layout, layout_of
from axonn_tp.grid.mesh import AXES, Grid, Mesh, factorisations
from axonn_tp.layers.cross_entropy import CrossEntropyLoss
from axonn_tp.layers.embedding import Embedding
from axonn_tp.layers.layer_norm import LayerNorm
from axonn_tp.layers.linear import Linear
from axonn_tp.layers.linear_split import LinearSplit, linear_collectives
from axonn_tp.options import Options
from axonn_tp.parallelize import parallelize
from axonn_tp.plan.placement import place
from axonn_tp.plan.report import Report
from axonn_tp.plan.rules import KINDS, LayerPlan, Placement
from axonn_tp.plan.search.auto import auto_plan
from axonn_tp.plan.verify import as_serial, first_difference

__all__ = [
    "AXES",
    "KINDS",
    "Collective",
    "CrossEntropyLoss",
    "Embedding",
    "GradientReducer",
    "GradScaler",
    "Grid",
    "LayerNorm",
    "LayerPlan",
    "Layout",
    "Linear",
    "LinearSplit",
    "Mesh",
    "Options",
    "Placement",
    "Report",
    "as_serial",
    "auto_plan",
    "clip_grad_norm_",
    "factorisations",
    "first_difference",
    "full_state_dict",
    "global_square",
    "grad_norm",
    "layout_of",
    "linear_collectives",
    "parallelize",
    "place",
    "sum_ranks",
    "sync_gradients",
]
