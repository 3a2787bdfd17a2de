"""Sizes of a transformer from HF's config.json, whose keys differ by family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axonn_plugins.config.base import ConfigError

_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "sequence": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
    "feed_forward": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "head_width": ("head_dim",),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PLAIN_MLP = ("gpt", "opt", "bloom", "bert", "vit", "falcon", "starcoder2", "mpt")
"""Families, by the beginning of model_type, whose MLP has two matrices; those of others with SiLU or gated GELU have three."""


def is_hf(table: Mapping[str, Any]) -> bool:
    """Whether the keys are those of HF's config.json."""
    return "model_type" in table or "architectures" in table or any(key in table for key in _KEYS["layers"])


def sizes_of(where: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes by our keys. A gated MLP counts as one 1.5 times as wide, which has as many parameters.

    Args:
        where: the file, for errors.
        table: its keys.

    Raises:
        ConfigError: a size is missing, or the model has experts.
    """
    inner = table.get("text_config")
    if isinstance(inner, Mapping) and not any(key in table for key in _KEYS["hidden"]):
        return sizes_of(where, inner)
    experts = [key for key in _EXPERTS if table.get(key) not in (None, 0, 1)]
    if experts:
        raise ConfigError(
            f"{where}: {experts[0]} = {table[experts[0]]!r} makes a mixture of experts, which is not modelled; give its base model"
        )
    sizes = {}
    for key, names in _KEYS.items():
        found = next((table[name] for name in names if table.get(name) is not None), None)
        if found is not None:
            sizes[key] = found
        elif key in ("layers", "hidden", "heads"):
            raise ConfigError(f'{where} lacks the key "{names[0]}", the {key} of the model; add it')
    if table.get("multi_query") is True and table.get("new_decoder_architecture") is not True:
        sizes["kv_heads"] = 1
    if isinstance(sizes.get("feed_forward"), int) and _gated(table):
        sizes["feed_forward"] = 3 * sizes["feed_forward"] // 2
    return sizes


def _gated(table: Mapping[str, Any]) -> bool:
    family = str(table.get("model_type", "")).lower()
    act = str(
        table.get("hidden_act") or table.get("hidden_activation") or table.get("activation_function") or ""
    ).lower()
    return not family.startswith(_PLAIN_MLP) and (
        act in ("silu", "swiglu", "geglu") or family.startswith(("gemma", "chatglm"))
    )
