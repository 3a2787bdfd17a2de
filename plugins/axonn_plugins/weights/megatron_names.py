"""Names that Megatron's GPTModel has for the tensors of HF's models, and the places of those that it fuses in one."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from axonn_plugins.config import ConfigError
from axonn_plugins.weights import hf

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Rotary settings that Megatron has no arguments for."""
_LAYER, _ATTENTION, _MLP = "decoder.layers.{}.", "self_attention.", "mlp."


@dataclass(frozen=True)
class Rule:
    """One of Megatron's tensors.

    Attributes:
        ours: Megatron's name.
        theirs: HF's, of the tensors that it is made of.
        join: from HF's to Megatron's.
        split: and back.
        optional: whether models may be without it.
    """

    ours: str
    theirs: tuple[str, ...]
    join: Callable[..., Tensor]
    split: Callable[[Tensor], tuple[Tensor, ...]]
    optional: bool = False


def rules(config: Any) -> list[Rule]:
    """Rules for the names of all tensors of a model, by HF's configuration."""
    made = list(_gpt2(config) if config.model_type == "gpt2" else _llama(config))
    if getattr(config, "tie_word_embeddings", False):
        return [Rule(r.ours, r.theirs, r.join, r.split, r.optional or r.ours == "output_layer.weight") for r in made]
    return made


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _alone(ours: str, theirs: str, turned: bool = False) -> Rule:
    turn = _turned if turned else _same
    return Rule(ours, (theirs,), turn, lambda tensor: (turn(tensor),))


def _turned(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous() if tensor.dim() == 2 else tensor


def _llama(config: Any) -> Iterator[Rule]:
    heads, width = config.num_attention_heads, config.hidden_size
    size = getattr(config, "head_dim", None) or width // heads
    groups = config.num_key_value_heads
    join, split = partial(_by_group, groups), partial(_from_groups, groups, heads // groups, size)
    yield _alone("embedding.word_embeddings.weight", "model.embed_tokens.weight")
    yield _alone("decoder.final_layernorm.weight", "model.norm.weight")
    yield _alone("output_layer.weight", "lm_head.weight")
    biases = config.model_type == "qwen2" or getattr(config, "attention_bias", False)
    for layer in range(config.num_hidden_layers):
        ours, theirs = _LAYER.format(layer), f"model.layers.{layer}."
        attention = f"{theirs}self_attn."
        for kind in ("weight", "bias") if biases else ("weight",):
            names = tuple(f"{attention}{part}_proj.{kind}" for part in "qkv")
            yield Rule(f"{ours}{_ATTENTION}linear_qkv.{kind}", names, join, split)
        yield _alone(f"{ours}{_ATTENTION}linear_qkv.layer_norm_weight", f"{theirs}input_layernorm.weight")
        yield _alone(f"{ours}{_ATTENTION}linear_proj.weight", f"{attention}o_proj.weight")
        if config.model_type == "qwen3":
            for part in "qk":
                yield _alone(f"{ours}{_ATTENTION}{part}_layernorm.weight", f"{attention}{part}_norm.weight")
        gated = tuple(f"{theirs}mlp.{part}_proj.weight" for part in ("gate", "up"))
        yield Rule(f"{ours}{_MLP}linear_fc1.weight", gated, lambda *t: torch.cat(t), lambda t: t.chunk(2))
        yield _alone(f"{ours}{_MLP}linear_fc1.layer_norm_weight", f"{theirs}post_attention_layernorm.weight")
        yield _alone(f"{ours}{_MLP}linear_fc2.weight", f"{theirs}mlp.down_proj.weight")


def _gpt2(config: Any) -> Iterator[Rule]:
    heads = config.n_head
    yield _alone("embedding.word_embeddings.weight", "transformer.wte.weight")
    yield _alone("embedding.position_embeddings.weight", "transformer.wpe.weight")
    yield _alone("output_layer.weight", "lm_head.weight")
    for kind in ("weight", "bias"):
        yield _alone(f"decoder.final_layernorm.{kind}", f"transformer.ln_f.{kind}")
    for layer in range(config.n_layer):
        ours, theirs = _LAYER.format(layer), f"transformer.h.{layer}."
        for kind in ("weight", "bias"):
            yield Rule(
                f"{ours}{_ATTENTION}linear_qkv.{kind}",
                (f"{theirs}attn.c_attn.{kind}",),
                lambda fused: _by_group(heads, *_turned(fused).chunk(3)),
                lambda fused: (_turned(torch.cat(_from_groups(heads, 1, config.n_embd // heads, fused))),),
            )
            yield _alone(f"{ours}{_ATTENTION}linear_qkv.layer_norm_{kind}", f"{theirs}ln_1.{kind}")
            yield _alone(f"{ours}{_ATTENTION}linear_proj.{kind}", f"{theirs}attn.c_proj.{kind}", turned=True)
            yield _alone(f"{ours}{_MLP}linear_fc1.{kind}", f"{theirs}mlp.c_fc.{kind}", turned=True)
            yield _alone(f"{ours}{_MLP}linear_fc1.layer_norm_{kind}", f"{theirs}ln_2.{kind}")
            yield _alone(f"{ours}{_MLP}linear_fc2.{kind}", f"{theirs}mlp.c_proj.{kind}", turned=True)


def _by_group(groups: int, *parts: Tensor) -> Tensor:
    """Queries, keys and values of each group of heads, one group after the other."""
    rest = parts[0].shape[1:]
    return torch.cat([part.reshape(groups, -1, *rest) for part in parts], 1).reshape(-1, *rest)


def _from_groups(groups: int, queries: int, size: int, fused: Tensor) -> tuple[Tensor, ...]:
    rest = fused.shape[1:]
    parts = fused.reshape(groups, -1, *rest).split([queries * size, size, size], 1)
    return tuple(part.reshape(-1, *rest) for part in parts)


def _rotary(rope: dict[str, Any]) -> dict[str, Any]:
    """Megatron's arguments of rotary positions, scaled or not."""
    base = rope.get("rope_theta", 10000)
    if base != int(base):
        raise ConfigError(f"config.json: rope_theta = {base} is not a whole number, as Megatron's --rotary-base is")
    kind, plain = rope.get("rope_type", "default"), {"rotary_base": int(base), "rotary_percent": 1.0}
    if kind == "default":
        return {**plain, "use_rope_scaling": False}
    wanted = {**_LLAMA3, "partial_rotary_factor": 1.0}
    if kind != "llama3" or any(rope.get(key, 1.0) != value for key, value in wanted.items()):
        raise ConfigError(
            f"config.json: rope_parameters = {rope} are not what Megatron's --use-rope-scaling computes, which is llama3 with {_LLAMA3}"
        )
    return {**plain, "use_rope_scaling": True, "rope_scaling_factor": rope["factor"]}


def _activation(config: Any) -> dict[str, Any]:
    """Megatron's arguments of what is between the two matrices of an MLP."""
    gpt2 = config.model_type == "gpt2"
    key = "activation_function" if gpt2 else "hidden_act"
    found = getattr(config, key)
    known = {**dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), True), "gelu": False} if gpt2 else {"silu": True}
    if found not in known:
        raise ConfigError(
            f'config.json: {key} = "{found}" is no activation of Megatron\'s GPTModel here; models with {", ".join(known)} have a place there'
        )
    return {"swiglu": not gpt2, "bias_gelu_fusion" if gpt2 else "bias_swiglu_fusion": known[found]}


def _attention(config: Any) -> dict[str, Any]:
    """Megatron's arguments of what tokens see."""
    for key, plain in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if (found := getattr(config, key, plain)) is not plain:
            raise ConfigError(f"config.json: {key} = {found} is not computed by Megatron, whose models have {plain}")
    window = hf.window_of(config)
    return {"window_size": None if window is None else (window - 1, 0)}


def arguments(config: Any) -> Namespace:
    """Arguments of Megatron's scripts for a model, which they keep with a checkpoint.

    Raises:
        ConfigError: they have no such rotary positions, activation or attention.
    """
    gpt2, heads = config.model_type == "gpt2", config.num_attention_heads
    groups = heads if gpt2 else config.num_key_value_heads
    rope = {} if gpt2 else dict(config.rope_parameters or {})
    return Namespace(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=(config.n_inner or 4 * config.hidden_size) if gpt2 else config.intermediate_size,
        num_attention_heads=heads,
        group_query_attention=groups != heads,
        num_query_groups=groups,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // heads,
        max_position_embeddings=config.max_position_embeddings,
        position_embedding_type="learned_absolute" if gpt2 else "rope",
        **_rotary(rope),
        **_activation(config),
        **_attention(config),
        normalization="LayerNorm" if gpt2 else "RMSNorm",
        norm_epsilon=config.layer_norm_epsilon if gpt2 else config.rms_norm_eps,
        add_bias_linear=gpt2,
        add_qkv_bias=gpt2 or config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False)),
        qk_layernorm=config.model_type == "qwen3",
        untie_embeddings_and_output_weights=not config.tie_word_embeddings,
        vocab_size=config.vocab_size,
        padded_vocab_size=config.vocab_size,
    )


def approximates_gelu(given: Mapping[str, Any]) -> bool:
    """True if Megatron computes GELU by tanh, as it does fused, and as Transformer Engine does."""
    return bool(given.get("bias_gelu_fusion", True) or given.get("use_te_activation_func"))


def configuration(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """HF's keys of a model that Megatron's arguments tell of (`megatron_told.known`); None where it is of no family here."""
    tied = not given.get("untie_embeddings_and_output_weights", False)
    heads, width = given["num_attention_heads"], given["hidden_size"]
    sizes = {"vocab_size": given.get("vocab_size") or given.get("padded_vocab_size"), "tie_word_embeddings": tied}
    gpt2 = not given.get("swiglu") and given.get("position_embedding_type") == "learned_absolute"
    if gpt2 and given.get("normalization", "LayerNorm") == "LayerNorm" and given.get("add_bias_linear", True):
        return {
            **sizes,
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_embd": width,
            "n_layer": given["num_layers"],
            "n_head": heads,
            "n_inner": given["ffn_hidden_size"],
            "n_positions": given["max_position_embeddings"],
            "activation_function": "gelu_new" if approximates_gelu(given) else "gelu",
            "layer_norm_epsilon": given.get("norm_epsilon", 1e-5),
        }
    if not given.get("swiglu") or given.get("normalization") != "RMSNorm" or given.get("add_bias_linear", True):
        return None
    if given.get("position_embedding_type") != "rope" or given.get("num_experts"):
        return None
    rope = {"rope_type": "default", "rope_theta": float(given.get("rotary_base", 10000))}
    if given.get("use_rope_scaling"):
        rope |= {"rope_type": "llama3", "factor": given.get("rope_scaling_factor", 8.0), **_LLAMA3}
    grouped = given.get("group_query_attention") and given.get("num_query_groups")
    kind = "qwen3" if given.get("qk_layernorm") else "qwen2" if given.get("add_qkv_bias") else "llama"
    window = given.get("window_size")
    if window is not None and kind != "llama":
        return None
    if window is not None:
        kind, sizes["sliding_window"] = "mistral", window[0] + 1
    return {
        **sizes,
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "hidden_size": width,
        "intermediate_size": given["ffn_hidden_size"],
        "num_hidden_layers": given["num_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": grouped or heads,
        "head_dim": given.get("kv_channels") or width // heads,
        "max_position_embeddings": given["max_position_embeddings"],
        "rms_norm_eps": given.get("norm_epsilon", 1e-5),
        "rope_parameters": rope,
    }
