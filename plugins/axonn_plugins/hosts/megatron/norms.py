"""LayerNorm and RMSNorm of the residual stream with the moments of whole rows, in place of Megatron's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from axonn_plugins.hosts.megatron.parameters import mark
from axonn_tp.grid.layout import layout_of
from axonn_tp.grid.mesh import Mesh
from axonn_tp.layers.layer_norm import LayerNorm, check_norm
from axonn_tp.layers.rms_norm import RMSNorm, check_rms_norm


def split_norm(norm: nn.Module, config: Any, mesh: Mesh, scattered: bool, name: str) -> nn.Module:
    """The norm that takes a norm's place.

    Args:
        norm: over the hidden size: torch's, apex's or Transformer Engine's.
        config: Megatron's.
        mesh: the mesh.
        scattered: the sequence is, over x.
        name: of the norm, for messages.

    Raises:
        ValueError: gy does not divide the hidden size, or the norm is of another kind.
    """
    like = next(norm.parameters())
    return new_norm(config, mesh, scattered, name, like.device, like.dtype)


def new_norm(
    config: Any, mesh: Mesh, scattered: bool, name: str, device: torch.device | str, dtype: torch.dtype
) -> nn.Module:
    """A norm of the residual stream, as `split_norm` makes it, on a device."""
    size, epsilon = config.hidden_size, config.layernorm_epsilon
    layer: nn.LayerNorm | nn.RMSNorm
    if config.normalization == "LayerNorm":
        layer = nn.LayerNorm(size, epsilon, device=device, dtype=dtype)
        check_norm(layer, mesh.grid, name)
        LayerNorm.convert(layer, mesh, scattered)
    elif config.normalization == "RMSNorm":
        layer = nn.RMSNorm(size, epsilon, device=device, dtype=dtype)
        check_rms_norm(layer, mesh.grid, name)
        RMSNorm.convert(layer, mesh, scattered)
    else:
        raise ValueError(
            f"normalization = {config.normalization!r} has no counterpart in axonn3d; use LayerNorm or RMSNorm"
        )
    layer.hands_out_shards = True  # type: ignore[assignment]
    for parameter in layer.parameters():
        mark(parameter, layout_of(parameter), mesh)
    return layer
