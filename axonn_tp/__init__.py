"""AxoNN's 4D algorithm, 3D parallel matrix multiplication × data, for any PyTorch model.

Sources: dissertation chapter 5; "Democratizing AI" (the Gordon Bell paper); "A 4D Hybrid Algorithm".
"""

from axonn_tp.auto import auto_plan
from axonn_tp.checkpoint import full_state_dict
from axonn_tp.collectives import Collective
from axonn_tp.embedding import Embedding
from axonn_tp.grad_scaler import GradScaler
from axonn_tp.gradients import clip_grad_norm_, global_square, grad_norm, sum_ranks, sync_gradients
from axonn_tp.layout import Layout, layout_of
from axonn_tp.linear import Linear
from axonn_tp.linear_split import LinearSplit, linear_collectives
from axonn_tp.loss import CrossEntropyLoss
from axonn_tp.mesh import AXES, Grid, Mesh, factorisations
from axonn_tp.norm import LayerNorm
from axonn_tp.options import Options
from axonn_tp.parallelize import parallelize
from axonn_tp.placement import place
from axonn_tp.plan import KINDS, LayerPlan, Placement
from axonn_tp.reducer import GradientReducer
from axonn_tp.report import Report
from axonn_tp.verify import as_serial, first_difference

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
