"""LayerNorm and RMSNorm of the residual stream with the moments of whole rows, in place of Megatron's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.parameters import mark
from axonn_plugins.hosts.megatron.sharing import stream_over
from axonn_tp.grid.layout import layout_of
from axonn_tp.grid.mesh import Mesh
from axonn_tp.layers.layer_norm import LayerNorm, check_norm
from axonn_tp.layers.rms_norm import RMSNorm, check_rms_norm

_KNOWN = ("torch", "apex", "megatron", "transformer_engine")
"""Packages whose norms are those that a config names."""


def split_norms(module: Any, names: tuple[str, ...]) -> None:
    """Put norms of shares of the stream in the place of a module's norms, where it has them and the stream is split."""
    settings, mesh = process_groups.settings(), process_groups.mesh()
    axes = stream_over(settings, mesh)
    for name in names:
        norm = getattr(module, name, None)
        if axes and norm is not None and list(norm.parameters()):
            setattr(module, name, split_norm(norm, module.config, mesh, "x" in axes, name))


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
    if not any(type(norm).__module__.startswith(f"{known}.") for known in _KNOWN):
        raise ValueError(
            f"{name} is a {type(norm).__name__}, in whose place axonn3d would put a {config.normalization}: of norms of one's own it does not "
            "know how they lie on a grid; use those of Megatron's specs, or leave gx and gy at 1"
        )
    like = next(norm.parameters())
    return new_norm(config, mesh, scattered, name, like.device, like.dtype)


def new_norm(
    config: Any, mesh: Mesh, scattered: bool, name: str, device: torch.device | str, dtype: torch.dtype
) -> nn.Module:
    """A norm of the residual stream, as `split_norm` makes it, on a device."""
    layer = _plain(config, config.hidden_size, device, dtype)
    if isinstance(layer, nn.LayerNorm):
        check_norm(layer, mesh.grid, name)
        LayerNorm.convert(layer, mesh, scattered)
    else:
        check_rms_norm(layer, mesh.grid, name)
        RMSNorm.convert(layer, mesh, scattered)
    layer.hands_out_shards = True  # type: ignore[assignment]
    for parameter in layer.parameters():
        mark(parameter, layout_of(parameter), mesh)
    return layer


def whole_norm(config: Any, size: int, mesh: Mesh, device: torch.device | str) -> nn.Module:
    """A norm of a latent, which is whole on every rank of x and y."""
    layer = _plain(config, size, device, config.params_dtype)
    for parameter in layer.parameters():
        mark(parameter, layout_of(parameter), mesh)
    return layer


def _plain(config: Any, size: int, device: torch.device | str, dtype: torch.dtype) -> nn.LayerNorm | nn.RMSNorm:
    if config.normalization not in ("LayerNorm", "RMSNorm"):
        raise ValueError(
            f"normalization = {config.normalization!r} has no counterpart in axonn3d; use LayerNorm or RMSNorm"
        )
    return getattr(nn, config.normalization)(size, config.layernorm_epsilon, device=device, dtype=dtype)
