"""Mixers that are no attention, from HF's config.json: state-space models (Mamba, Mamba-2), linear attention, gated delta rule, short convolutions.

Sizes of `sizes.Transformer` by its keys: `kinds` and those that begin with `mixer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Table = Mapping[str, Any]
_BLOCK = 256
"""Positions of a chunk where the configuration does not say."""
_LETTERS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
_DELTA_CHUNK = 64
"""Positions of a chunk in the gated delta rule's kernels (Yang et al. 2024, arXiv 2412.06464)."""


def mixers(family: str, table: Table, layers: int, hidden: int, sparse: Sequence[bool] | None) -> dict[str, Any]:
    """Sizes of a model's mixers and what each of its layers has; nothing for a family that has none or is not known.

    Args:
        family: its model_type.
        table: keys with values.
        layers: num_hidden_layers.
        hidden: features of the residual stream.
        sparse: of each layer, whether it has experts; None for a model without.

    Raises:
        KeyError: a key is missing.
        TypeError: or its value no number.
    """
    found = FAMILIES.get(family)
    if found is None:
        return {}
    return found(table, layers, hidden, sparse or [False] * layers)


def _mlps(kinds: Sequence[str], sparse: Sequence[bool]) -> str:
    return " ".join(kind + ("E" if routed else "-") for kind, routed in zip(kinds, sparse, strict=True))


def _mamba(table: Table, hidden: int, prefix: str = "") -> dict[str, Any]:
    """Gu & Dao 2023 (arXiv 2312.00752): steps, inputs and outputs of the state are made of what the convolution gives."""
    inner = table.get("intermediate_size") if not prefix else None
    inner = inner or int(table.get(f"{prefix}expand", 2) * hidden)
    rank = table.get("time_step_rank" if not prefix else f"{prefix}dt_rank", "auto")
    rank = -(-hidden // 16) if rank == "auto" else rank
    state = table["state_size" if not prefix else f"{prefix}d_state"]
    kernel = table.get("conv_kernel" if not prefix else f"{prefix}d_conv", 4)
    norms = rank + 2 * state if prefix else 0
    return {
        "mixer_gives": 2 * inner,
        "mixer_takes": inner,
        "mixer_within": 2 * (rank + state),
        "mixer_heads": inner,
        "mixer_state": state,
        "mixer_other": inner * (kernel + 1 + state + 2) + norms,
    }


def _mamba2(
    inner: int, heads: int, state: int, groups: int, kernel: int, chunk: int, norm: bool = True
) -> dict[str, Any]:
    """Dao & Gu 2024 (arXiv 2405.21060)."""
    convolved = inner + 2 * groups * state
    return {
        "mixer_gives": inner + convolved + heads,
        "mixer_takes": inner,
        "mixer_heads": heads,
        "mixer_state": state,
        "mixer_chunk": chunk,
        "mixer_other": convolved * (kernel + 1) + 3 * heads + (inner if norm else 0),
    }


def _of_mamba2(table: Table, hidden: int, norm: bool = True) -> dict[str, Any]:
    """Sizes of a Mamba 2 mixer, by the keys of hybrid models."""
    inner = table.get("mamba_d_ssm") or table["mamba_n_heads"] * table["mamba_d_head"]
    return _mamba2(
        inner,
        table["mamba_n_heads"],
        table["mamba_d_state"],
        table.get("mamba_n_groups", 1),
        table.get("mamba_d_conv", 4),
        table.get("mamba_chunk_size", _BLOCK),
        norm,
    )


def _delta(table: Table) -> dict[str, Any]:
    """Gated delta rule: queries, keys, values, a gate as wide as values, and two rates a head of values."""
    heads, states = table["linear_num_value_heads"], table["linear_key_head_dim"]
    keys, values = table["linear_num_key_heads"] * states, heads * table["linear_value_head_dim"]
    return {
        "mixer_gives": 2 * keys + 2 * values + 2 * heads,
        "mixer_takes": values,
        "mixer_heads": table["linear_num_key_heads"],
        "mixer_state": states,
        "mixer_chunk": _DELTA_CHUNK,
        "mixer_other": (2 * keys + values) * table.get("linear_conv_kernel_dim", 4)
        + 2 * heads
        + table["linear_value_head_dim"],
    }


def _only_mamba(table: Table, layers: int, hidden: int, sparse: Sequence[bool]) -> dict[str, Any]:
    sizes = _mamba(table, hidden)
    return {**sizes, "kinds": " ".join(["M"] * layers), "heads": sizes["mixer_heads"], "head_width": 1}


def _only_mamba2(table: Table, layers: int, hidden: int, sparse: Sequence[bool]) -> dict[str, Any]:
    heads, width = table["num_heads"], table["head_dim"]
    rest = table["n_groups"], table.get("conv_kernel", 4), table.get("chunk_size", _BLOCK)
    sizes = _mamba2(heads * width, heads, table["state_size"], *rest)
    return {**sizes, "kinds": " ".join(["M"] * layers), "heads": heads, "head_width": width}


def _jamba(table: Table, layers: int, hidden: int, sparse: Sequence[bool]) -> dict[str, Any]:
    period, offset = table["attn_layer_period"], table["attn_layer_offset"]
    kinds = ["*" if at % period == offset else "M" for at in range(layers)]
    every, first = table["expert_layer_period"], table["expert_layer_offset"]
    routed = [table.get("num_experts", 1) > 1 and at % every == first for at in range(layers)]
    return {**_mamba(table, hidden, "mamba_"), "kinds": _mlps(kinds, routed)}


def _bamba(table: Table, layers: int, hidden: int, sparse: Sequence[bool]) -> dict[str, Any]:
    attending = table.get("attn_layer_indices") or ()
    kinds = ["*" if at in attending else "M" for at in range(layers)]
    return {**_of_mamba2(table, hidden), "kinds": _mlps(kinds, sparse)}


def _falcon_h1(table: Table, layers: int, hidden: int, sparse: Sequence[bool]) -> dict[str, Any]:
    """Attention and Mamba-2 side by side."""
    return {**_of_mamba2(table, hidden, bool(table.get("mamba_rms_norm"))), "kinds": " ".join(["M*-"] * layers)}


def _granite(table: Table, layers: int, hidden: int, sparse: Sequence[bool]) -> dict[str, Any]:
    kinds = ["*" if kind in ("attention", "full_attention") else "M" for kind in table["layer_types"]]
    if table.get("num_local_experts"):
        return {**_of_mamba2(table, hidden), "kinds": _mlps(kinds, [True] * layers)}
    dense = {"feed_forward": table["shared_intermediate_size"]}
    return {**_of_mamba2(table, hidden), **dense, "kinds": _mlps(kinds, [False] * layers)}


def _nemotron(table: Table, layers: int, hidden: int, sparse: Sequence[bool]) -> dict[str, Any]:
    """Each of its layers is a mixer or an MLP; here a layer begins with a mixer, and has the MLPs behind it."""
    pattern = table.get("hybrid_override_pattern") or "".join(_LETTERS[kind] for kind in table["layers_block_type"])
    words: list[str] = []
    for letter in pattern:
        if words and letter in "-E" and not set(words[-1]) & set("-E"):
            words[-1] += letter
        else:
            words.append(letter)
    sizes = _mamba2(
        table["mamba_num_heads"] * table["mamba_head_dim"],
        table["mamba_num_heads"],
        table["ssm_state_size"],
        table["n_groups"],
        table.get("conv_kernel", 4),
        table.get("chunk_size", _BLOCK),
    )
    return {**sizes, "layers": len(words), "kinds": " ".join(words)}


def _by_types(of: Callable[[Table], dict[str, Any]], gate: bool = False) -> Callable[..., dict[str, Any]]:
    """Families that say of each layer whether it attends."""

    def found(table: Table, layers: int, hidden: int, sparse: Sequence[bool]) -> dict[str, Any]:
        kinds = ["*" if "attention" in kind and "linear" not in kind else "M" for kind in table["layer_types"]]
        return {**of(table), "attention_gate": gate, "kinds": _mlps(kinds, sparse)}

    return found


def _lightning(table: Table) -> dict[str, Any]:
    """MiniMax-01 (arXiv 2501.08313): queries, keys, values and a gate."""
    heads = table["num_attention_heads"]
    width = table.get("head_dim") or table["hidden_size"] // heads
    return {
        "mixer_gives": 4 * heads * width,
        "mixer_takes": heads * width,
        "mixer_heads": heads,
        "mixer_state": width,
        "mixer_chunk": table.get("block_size", _BLOCK),
        "mixer_other": heads * width,
    }


def _minimax(table: Table, layers: int, hidden: int, sparse: Sequence[bool]) -> dict[str, Any]:
    kinds = table.get("layer_types") or [
        "full_attention" if kind else "linear_attention" for kind in table["attn_type_list"]
    ]
    return _by_types(_lightning)({**table, "layer_types": kinds}, layers, hidden, [True] * layers)


def _short(table: Table) -> dict[str, Any]:
    """LFM2's convolutions between two gates."""
    hidden = table["hidden_size"]
    return {
        "mixer_gives": 3 * hidden,
        "mixer_takes": hidden,
        "mixer_heads": hidden,
        "mixer_other": hidden * table.get("conv_L_cache", 3),
    }


def _lfm2(table: Table, layers: int, hidden: int, sparse: Sequence[bool]) -> dict[str, Any]:
    sizes, inner = _by_types(_short)(table, layers, hidden, sparse), table["intermediate_size"]
    if table.get("block_auto_adjust_ff_dim"):
        multiple = table["block_multiple_of"]
        inner = int(table["block_ffn_dim_multiplier"] * int(2 * inner / 3))
        inner = -(-inner // multiple) * multiple
    return {**sizes, "feed_forward": inner}


FAMILIES: dict[str, Callable[..., dict[str, Any]]] = {
    **dict.fromkeys(("mamba", "falcon_mamba"), _only_mamba),
    "mamba2": _only_mamba2,
    "jamba": _jamba,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite,
    "nemotron_h": _nemotron,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _by_types(_delta, gate=True)),
    "olmo_hybrid": _by_types(_delta),
    **dict.fromkeys(("minimax", "minimax_text_01"), _minimax),
    "lfm2": _lfm2,
    "lfm2_moe": _by_types(_short),
}
"""Families by model_type."""
