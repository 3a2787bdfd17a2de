"""Multi-latent attention on a grid: the projections down give every rank of x and y whole latents, those up take each rank's share of them.

Heads are split as in plain attention. Norms of latents see whole ones, the same on all these ranks, and so do their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from megatron.core.transformer import multi_latent_attention
from torch import Tensor, nn

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.layers import ColumnParallelLinear
from axonn_plugins.hosts.megatron.originals import Originals
from axonn_plugins.hosts.megatron.sharing import heads_over
from axonn_tp.comm.collectives import copy_to


def install(originals: Originals) -> None:
    """Have attentions that are made from now on lie on the grid."""
    # Megatron asks which class a projection down is of.
    originals.replace(multi_latent_attention, "ColumnParallelLinear", ColumnParallelLinear)
    originals.wrap(multi_latent_attention.MLASelfAttention, "__init__", _with_latents)


def _with_latents(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def init(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        for name in ("q_layernorm", "kv_layernorm"):
            for parameter in getattr(self, name, nn.Identity()).parameters():
                # Megatron would sum some of them over all ranks of x and y, which have the same.
                parameter.average_gradients_across_tp_domain = True  # type: ignore[union-attr]
        self.linear_kv_down_proj.register_forward_hook(_for_all_heads(self.config.kv_lora_rank))

    return init


def _for_all_heads(rank: int) -> Callable[..., Any]:
    """Every rank adds the positions in a latent, which lie behind its first features, to the keys of its own heads."""

    def hook(module: nn.Module, given: object, result: tuple[Tensor, None]) -> tuple[Tensor, None]:
        settings, mesh = process_groups.settings(), process_groups.mesh()
        axes = heads_over(settings, mesh, module.config.num_query_groups)  # type: ignore[union-attr,arg-type]
        latent, positions = result[0][..., :rank], result[0][..., rank:]
        positions = copy_to(positions, mesh, "model" if len(axes) > 1 else "x")
        return torch.cat([latent, positions], -1), None

    return hook
