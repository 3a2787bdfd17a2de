"""Multi-latent attention on a grid: the projections down give every rank of x and y whole latents, those up take each rank's share of them.

Heads are split as in plain attention. Norms of latents see whole ones, the same on all these ranks, and so do their gradients. Where ranks
share sequences, latents travel between them, and each rank makes the keys and values of its own heads for all tokens of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from megatron.core.transformer import multi_latent_attention
from torch import Tensor, nn

from axonn_plugins.hosts.megatron import context, process_groups
from axonn_plugins.hosts.megatron.engine_layers import EngineColumnParallelLinear
from axonn_plugins.hosts.megatron.layers import ColumnParallelLinear
from axonn_plugins.hosts.megatron.originals import Originals
from axonn_plugins.hosts.megatron.sharing import heads_over
from axonn_tp.comm.collectives import copy_to


def install(originals: Originals) -> None:
    """Have attentions that are made from now on lie on the grid."""
    # Megatron asks which class a projection down is of.
    originals.replace(multi_latent_attention, "ColumnParallelLinear", ColumnParallelLinear)
    originals.replace(multi_latent_attention, "TEColumnParallelLinear", EngineColumnParallelLinear)
    originals.wrap(multi_latent_attention.MLASelfAttention, "__init__", _with_latents)
    originals.wrap(multi_latent_attention.MLASelfAttention, "get_query_key_value_tensors", _of_all_tokens)


def _with_latents(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def init(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        for name in ("q_layernorm", "kv_layernorm"):
            for parameter in getattr(self, name, nn.Identity()).parameters():
                # Megatron would sum some of them over all ranks of x and y, which have the same.
                parameter.average_gradients_across_tp_domain = True  # type: ignore[union-attr]
        self.linear_kv_down_proj.register_forward_hook(_for_all_heads(self.config.kv_lora_rank))
        if (
            context.ranks() > 1
            and not self.recompute_up_proj
            and travels(self.config, self.num_attention_heads_per_partition, context.ranks(), self.core_attention.how)
        ):
            self.linear_kv_up_proj.register_forward_pre_hook(_gather)
            self.linear_kv_up_proj.register_forward_hook(_set_aside)

    return init


def travels(config: Any, heads: int, ranks: int, how: str | None) -> bool:
    """True if a rank sends less of latents, which are gathered once and their gradients summed, than of attention's inputs.

    Args:
        config: Megatron's.
        heads: of a rank.
        ranks: that share a sequence.
        how: heads are dealt out where that was asked for, and where nothing was, if that sends less.
    """
    latent = config.kv_lora_rank + config.qk_pos_emb_head_dim
    made = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim)
    # Keys and values are fetched again in backward; by heads, queries and outputs travel as well, and a part of each.
    dealt = 4 * made // ranks if how is None and heads % ranks == 0 else 3 * made
    return how != "heads" and 2 * latent < min(3 * made, dealt)


def _gather(module: Any, given: tuple[Tensor]) -> tuple[Tensor]:
    return (context.of_all(given[0]),)


def _set_aside(module: Any, given: object, result: tuple[Tensor, None]) -> tuple[Tensor, None]:
    """Megatron goes on with this rank's tokens, which have the same positions as its queries."""
    module.axonn_made = result[0]
    whole = context.shared(len(result[0]) // context.ranks())
    return result[0].index_select(0, whole.places(result[0].device)), None


def _of_all_tokens(original: Callable[..., tuple]) -> Callable[..., tuple]:
    @wraps(original)
    def tensors(self: Any, *args: Any, **named: Any) -> tuple:
        query, key, value, *rest = original(self, *args, **named)
        made = vars(self.linear_kv_up_proj).pop("axonn_made", None)
        if made is None:
            return (query, key, value, *rest)
        heads, width = key.shape[-2], self.config.qk_head_dim
        keys, values = made.unflatten(-1, (heads, -1)).split([width, self.config.v_head_dim], -1)
        # Turned by its position, which is the same for all heads.
        positions = context.of_all(key[..., :1, width:])
        return (query, torch.cat([keys, positions.expand(*keys.shape[:-1], -1)], -1), values, *rest)

    return tensors


def _for_all_heads(rank: int) -> Callable[..., Any]:
    """Every rank adds the positions in a latent, which lie behind its first features, to the keys of its own heads."""

    def hook(module: nn.Module, given: object, result: tuple[Tensor, None]) -> tuple[Tensor, None]:
        settings, mesh = process_groups.settings(), process_groups.mesh()
        axes = heads_over(settings, mesh, module.config.num_query_groups)  # type: ignore[union-attr,arg-type]
        latent, positions = result[0][..., :rank], result[0][..., rank:]
        positions = copy_to(positions, mesh, "model" if len(axes) > 1 else "x")
        return torch.cat([latent, positions], -1), None

    return hook
