"""The plan of the U-Net's layers on the grid."""

from __future__ import annotations

from axonn_recipes.models.unet import UNetConfig
from axonn_tp import LayerPlan


def unet_plan(config: UNetConfig) -> dict[str, LayerPlan]:
    """A plan for `axonn_tp.parallelize`.

    Features are whole between blocks, where skip connections are joined, and split inside each: the two convolutions of
    a residual block are a pair with a GroupNorm in it, which the time embedding's scale and shift join; so are attention's
    projections and the time embedding's own layers. What is left, the convolutions that change resolution or the number
    of features, is self-contained.
    """
    return {
        "time.fc1": LayerPlan("normal"),
        "time.fc2": LayerPlan("transposed"),
        "*.conv1": LayerPlan("normal"),
        "*.time": LayerPlan("normal", parts=2),
        "*.norm2": LayerPlan("group_norm"),
        "*.conv2": LayerPlan("transposed"),
        "*.qkv": LayerPlan("normal", parts=3, heads=config.heads),
        "*.proj": LayerPlan("transposed"),
    }
