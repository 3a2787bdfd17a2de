"""Sizes of a transformer from HF's config.json, whose keys differ by family.

What a configuration leaves out is what its class in transformers says, where transformers is installed and knows the family.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from axonn_plugins.config.base import ConfigError
from axonn_plugins.planner import files
from axonn_plugins.planner.hf_mixers import FAMILIES, mixers

_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "sequence": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
    "feed_forward": ("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "kv_n_heads"),
    "head_width": ("head_dim", "kv_channels"),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
}
_LATENT = {
    "kv_rank": "kv_lora_rank",
    "q_rank": "q_lora_rank",
    "rope_width": "qk_rope_head_dim",
    "head_width": "qk_nope_head_dim",
    "value_width": "v_head_dim",
}
"""Keys of multi-latent attention by our names, where there is a kv_lora_rank."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "moe_top_k", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts")
_EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
_MOST_LAYERS = 10_000
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "ffn_act_fn", "hidden_activation_function")
_GATES = ("silu", "swish", "swiglu", "geglu")
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
_PLAIN_MLP = ("gpt2", "gptj", "gpt_neo", "gpt_bigcode", "opt", "bloom", "bert", "vit", "falcon", "starcoder2", "mpt")
"""Families, by the beginning of model_type, whose MLP has two matrices; those of others with SiLU or gated GELU have three."""
_GATED = ("chatglm", "modernbert", "bitnet", "lfm2", "falcon_h1")
"""Families whose MLP is gated, whatever its activation; those of Gemma, too."""
_POSITIONS = ("gpt2", "gpt_bigcode", "opt", "bert", "roberta", "xlm-roberta", "biogpt", "openai-gpt", "gpt-sw3")
"""Families with a table of learned positions; gpt_neo is one, too, but gpt_neox is not."""
_TIED = (*_POSITIONS, "gpt_neo", "bloom", "falcon", "mpt", "gemma", "cohere", "starcoder2")
"""Families whose tables of tokens are one where their configuration does not say."""
_OF_ANOTHER_WIDTH = "tables of tokens of another width"
_NOT_KNOWN = {
    "experts of fewer features than the model's": ("moe_latent_size",),
    "layers of state-space models": ("ssm_", "mamba_", "state_size", "time_step_rank", "hybrid_override_pattern"),
    "recurrent layers": ("lru_width", "rwkv_", "attention_hidden_size", "mlstm_", "qk_dim_factor"),
    "linear attention": ("linear_num_", "linear_attn_config"),
    "layers that differ from one another": ("block_configs", "num_query_heads_per_layer", "num_global_key_value_heads"),
    "cross-attention": ("cross_attention_layers",),
    "layers that share their parameters": ("num_hidden_groups",),
    "embeddings of every layer": ("hidden_size_per_layer_input",),
    "experts that do nothing": ("zero_expert_num",),
    _OF_ANOTHER_WIDTH: ("embedding_size", "input_embedding_size", "word_embed_proj_dim"),
}
"""Families with other parameters than attention and MLPs, by the beginning of a key."""
_OTHER_FAMILIES = (
    "doge",
    "gemma4",
    "hrm_text",
    "jetmoe",
    "moshi",
    "ctrl",
    "xlnet",
    "xmod",
    "roc_bert",
    "phi4_multimodal",
)
"""Families with other parameters than attention and MLPs where no key says so."""
_ATTENTIONS = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "attention")


def is_hf(table: Mapping[str, Any]) -> bool:
    """True if the keys are those of HF's config.json."""
    return "model_type" in table or "architectures" in table or any(key in table for key in _KEYS["layers"])


def sizes_of(where: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes by our keys; of a multimodal model those of its text's, and what is for images as `other` parameters.

    Args:
        where: the file, for errors.
        table: its keys.

    Raises:
        ConfigError: a size is missing, or the model is of a kind that is not modelled.
    """
    for part in (table, *(table[key] for key in _TEXT if isinstance(table.get(key), Mapping))):
        for name in _KEYS["layers"]:
            if isinstance(part.get(name), int):  # before transformers makes as many
                files.whole(f"{where}: {name}", part[name], 0, _MOST_LAYERS)
    full = _completed(table)
    inner = next((full[key] for key in _TEXT if isinstance(full.get(key), Mapping)), None)
    if inner is not None and not any(key in full for key in _KEYS["hidden"]):
        said = {key: table[key] for key in ("tie_word_embeddings",) if key in table}
        sizes = sizes_of(where, _given(inner) | said)
    else:
        sizes = _sizes(where, full)
    return sizes | {"other": sizes.get("other", 0) + _images(full.get("vision_config"), sizes["hidden"])}


def _sizes(where: str, full: Mapping[str, Any]) -> dict[str, Any]:
    table = _given(full) | {
        key: value
        for nested in ("attn_config", "ffn_config")
        if isinstance(full.get(nested), Mapping)
        for key, value in full[nested].items()
    }
    family = str(table.get("model_type", "")).lower()
    kinds = _first(table, ("hybrid_override_pattern", "layers_block_type"))
    if isinstance(kinds, (str, list)):
        table["num_hidden_layers"] = len(kinds)
    _refuse(where, family, table)
    sizes: dict[str, Any] = {}
    for key, names in _KEYS.items():
        found = next((name for name in names if name in table), None)
        if found is not None:
            sizes[key] = files.whole(f"{where}: {found}", table[found], 0)
        elif key in ("layers", "hidden", "heads") and not (key == "heads" and family in FAMILIES):
            raise ConfigError(f'{where} lacks the key "{names[0]}", the {key} of the model; add it')
    if table.get("multi_query") is True and table.get("new_decoder_architecture") is not True:
        sizes["kv_heads"] = 1
    tied = table.get("tie_word_embeddings", family.startswith(_TIED))
    sizes |= {"gated": _gated(family, table), "untied": not tied}
    if table.get("kv_lora_rank"):
        sizes = {key: size for key, size in sizes.items() if key not in ("kv_heads", "head_width")}
        sizes |= {ours: table[name] for ours, name in _LATENT.items() if name in table}
    if (family.startswith(_POSITIONS) or family == "gpt_neo") and "sequence" in sizes:
        sizes["other"] = sizes["sequence"] * sizes["hidden"]
    return sizes | _mixture(where, table, sizes) | _mixers(where, family, table, sizes)


def _mixers(where: str, family: str, table: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of what is no attention, where a model has it, and what each layer has."""
    routed = _first(table, _EXPERTS) not in (None, 0, 1)
    try:
        sparse = _sparse(table, sizes["layers"]) if routed else None
        found = mixers(family, table, sizes["layers"], sizes["hidden"], sparse)
    except KeyError as key:
        raise ConfigError(f"{where} lacks the key {key}, which says what the layers of {family} are; add it") from None
    except (TypeError, ValueError, ZeroDivisionError):
        raise ConfigError(f"{where} does not say in numbers what the layers of {family} are; mend it") from None
    if not found:
        return {}
    plain = {"dense_layers": 0, "sparse_every": 1} if routed else {}
    if "E" not in found["kinds"]:
        plain = dict.fromkeys(
            ("experts", "experts_per_token", "expert_feed_forward", "shared_feed_forward", "dense_layers"), 0
        )
    return plain | found


def _completed(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """With what the family's class has for keys that are left out."""
    with contextlib.suppress(Exception):  # not installed, a family that it does not know, or keys that it refuses
        from transformers import CONFIG_MAPPING

        with _silent(logging.getLogger("transformers")):
            return CONFIG_MAPPING[table["model_type"]].from_dict(dict(table)).to_dict()
    return table


@contextlib.contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    """Without warnings, which are of rotary embeddings and the like."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _given(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


def _first(table: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((table[name] for name in names if name in table), None)


def _refuse(where: str, family: str, table: Mapping[str, Any]) -> None:
    """Refuse a family that is not modelled, and keys that change a modelled one."""
    if family in FAMILIES and not table.get("moe_latent_size"):
        return
    use = "which is not modelled; give a decoder of attention and MLPs, or of a family whose mixers are"
    for what, keys in _NOT_KNOWN.items():
        without = (0, False, *([table.get("hidden_size")] if what == _OF_ANOTHER_WIDTH else []))
        found = next((key for key in table if key.startswith(keys) and table[key] not in without), None)
        if found:
            raise ConfigError(f"{where}: {found} = {table[found]!r} means {what}, {use}")
    for key in ("layer_types", "attn_type_list"):
        if not isinstance(table.get(key, []), list):
            raise ConfigError(f"{where}: {key} = {table[key]!r} is not a list; write one value for each layer")
    other = [one for one in table.get("layer_types", ()) if one not in _ATTENTIONS]
    if other:
        raise ConfigError(f'{where}: layer_types has "{other[0]}", {use}')
    if 0 in table.get("attn_type_list", ()):
        raise ConfigError(f"{where}: attn_type_list has 0, linear attention, {use}")
    if table.get("is_encoder_decoder"):
        raise ConfigError(f"{where}: is_encoder_decoder is true, {use}")
    if family.startswith(_OTHER_FAMILIES):
        raise ConfigError(f'{where}: model_type = "{table["model_type"]}", {use}')


def _gated(family: str, table: Mapping[str, Any]) -> bool:
    act = _first(table, _ACTIVATIONS) or ""
    act = str(act.get("name", "") if isinstance(act, Mapping) else act).lower()
    if family.startswith(_GATED):
        return True
    return (act in _GATES or "gemma" in family) and not family.startswith(_PLAIN_MLP)


def _mixture(where: str, table: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of experts."""
    count = _first(table, _EXPERTS)
    if count in (None, 0, 1):
        return {}
    layers, width, per_token = sizes["layers"], _first(table, _EXPERT_WIDTH), _first(table, _PER_TOKEN)
    shared = _first(table, _SHARED) or 0
    count, width, per_token, shared = (_alike(one, layers) for one in (count, width, per_token, shared))
    if not all(isinstance(one, int) for one in (count, width, per_token, shared)):
        raise ConfigError(
            f"{where}: experts = {count!r}, of {width!r} features, {per_token!r} for each token, are not whole numbers; give a model "
            "whose layers have the same experts"
        )
    shared = shared * width if _first(table, _SHARED_WIDTH) is None else _first(table, _SHARED_WIDTH)
    if "interleave_moe_layer_step" in table:  # Llama 4 has one besides, and says so nowhere
        shared = width
    try:
        sparse = _sparse(table, layers)
    except (TypeError, ZeroDivisionError):
        raise ConfigError(f"{where} does not say in numbers which layers have its {count} experts; mend it") from None
    start = sparse.index(True) if any(sparse) else layers
    every = next((step for step in range(1, layers) if _pattern(layers, start, step) == sparse), 1)
    dense = max(start + 1 - every, 0)
    if (layers - dense) // every != sum(sparse):  # not a pattern of ours: as many, the last ones
        dense, every = layers - sum(sparse), 1
    return {
        "experts": count,
        "experts_per_token": per_token,
        "expert_feed_forward": width,
        "shared_feed_forward": shared,
        "dense_layers": dense,
        "sparse_every": every,
    }


def _alike(value: Any, layers: int) -> Any:
    """The one number that all of a list's are, one for each layer."""
    same = isinstance(value, list) and len(value) == layers and len(set(value)) == 1
    return value[0] if same else value


def _pattern(layers: int, first: int, every: int) -> list[bool]:
    return [at >= first and (at - first) % every == 0 for at in range(layers)]


def _sparse(table: Mapping[str, Any], layers: int) -> list[bool]:
    """Which layers have experts."""
    kinds, listed, every = table.get("mlp_layer_types"), table.get("moe_layers"), table.get("moe_layer_freq") or 1
    if kinds:
        return [kind == "sparse" for kind in kinds]
    if isinstance(every, list):
        return [bool(one) for one in every]
    if listed:
        return [at in listed for at in range(layers)]
    step = _first(table, ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")) or 1
    first = _first(table, ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")) or 0
    last = table.get("moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else last
    plain = table.get("mlp_only_layers", ())
    return [
        first <= at <= last and at % every == 0 and (at + 1) % step == 0 and at not in plain for at in range(layers)
    ]


def _images(vision: Any, text: int) -> int:
    """Parameters of a tower for images and of the two layers that lead from it to the text's features, roughly."""
    if not isinstance(vision, Mapping):
        return 0
    vision = _given(_completed(vision))
    hidden, layers = (
        _first(vision, names) for names in (("embed_dim", *_KEYS["hidden"], "width"), (*_KEYS["layers"], "depth"))
    )
    if not (isinstance(hidden, int) and isinstance(layers, int)):
        return 0
    inner = _number(vision, "intermediate_size", hidden * _number(vision, "mlp_ratio", 4))
    gated = _first(vision, _ACTIVATIONS) in _GATES or vision.get("model_type") == "pixtral"
    merged, mergers = (
        hidden * int(_number(vision, "spatial_merge_size", 1)) ** 2,
        1 + len(deepest if isinstance(deepest := vision.get("deepstack_visual_indexes"), list) else ()),
    )
    to_text = merged * (merged + text) * mergers if merged > hidden else (hidden + text) * text
    return layers * (4 * hidden**2 + (3 if gated else 2) * hidden * int(inner)) + to_text


def _number(table: Mapping[str, Any], key: str, otherwise: float) -> float:
    """A key's number; of what is missing, 0 or no number, the other."""
    found = table.get(key)
    return found if isinstance(found, (int, float)) and found else otherwise
