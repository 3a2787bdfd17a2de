"""Megatron's arguments beside a model's weights: what they say that HF's models do not compute, or that a configuration says otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from axonn_plugins.config import ConfigError
from axonn_plugins.weights.megatron_names import approximates_gelu, arguments

_EARLIER = {"layernorm_epsilon": "norm_epsilon", "layernorm_zero_centered_gamma": "apply_layernorm_1p"}
"""Names since Megatron 0.16, and those before."""
_PLAIN: dict[str, tuple[Any, ...]] = {
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "rotary_seq_len_interpolation_factor": (1,),
    "no_rope_freq": (),
    "window_attn_skip_freq": (),
    "qk_l2_norm": (False,),
    "softmax_type": ("vanilla",),
    "softmax_scale": (),
    "attention_output_gate": (False,),
    "multi_latent_attention": (False,),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (),
}
"""Values with which HF's models compute the same; None is one of all."""
_COMPARED = (
    *("num_attention_heads", "num_query_groups", "kv_channels", "normalization", "norm_epsilon", "qk_layernorm"),
    *("position_embedding_type", "swiglu", "bias_gelu_fusion", "window_size"),
)
_OF_ROPE = ("rotary_base", "use_rope_scaling", "rope_scaling_factor")
_NOT_TAKEN = {
    "norm_epsilon": 1e-5,
    "qk_layernorm": False,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "bias_gelu_fusion": True,
    "window_size": None,
}
"""Arguments that --use-checkpoint-args leaves as the command line has them, and their defaults."""


def known(told: Any) -> dict[str, Any]:
    """Arguments by the names of all versions alike.

    Args:
        told: the namespace that Megatron kept.
    """
    given = dict(vars(told))
    return given | {name: given[later] for later, name in _EARLIER.items() if later in given}


def check(told: Any, folder: Path) -> None:
    """Refuse what HF's models of these families do not compute.

    Raises:
        ConfigError: names the argument.
    """
    for name, allowed in _PLAIN.items():
        value = known(told).get(name)
        if value is not None and value not in allowed:
            raise ConfigError(f"{folder} was trained with {_flag(name, value)}, which no HF model here computes")


def compare(told: Any, config: Any, folder: Path) -> None:
    """Refuse a configuration of another model, which may have weights of the same sizes.

    Raises:
        ConfigError: names the argument.
    """
    check(told, folder)
    given, here = known(told), vars(arguments(config))
    for name in (*_COMPARED, *(_OF_ROPE if here["position_embedding_type"] == "rope" else ())):
        if name not in given or name != "window_size" and (given[name] is None or name not in here):
            continue
        most = min(one.get("max_position_embeddings") or math.inf for one in (given, here))
        saved, wanted = (_effective(name, one, most) for one in (given, here))
        if saved != wanted:
            raise ConfigError(
                f"{folder} was trained {_in_words(name, saved)}, and the model of config.json is one {_in_words(name, wanted)}; give its own --config"
            )


def _effective(name: str, given: Mapping[str, Any], most: float) -> Any:
    """The value of an argument, of what others leave it, over so many tokens at most."""
    value = given.get(name)
    if name == "window_size":
        return None if value is None or value[0] + 1 >= most else tuple(value)
    if name == "num_query_groups" and not given.get("group_query_attention"):
        return given["num_attention_heads"]
    if name == "rope_scaling_factor" and not given.get("use_rope_scaling"):
        return None
    if name == "bias_gelu_fusion":
        return None if given.get("swiglu") else approximates_gelu(given)
    return value


def flags(config: Any) -> str:
    """Flags that a script needs for a model besides --use-checkpoint-args; empty where there are none."""
    return " ".join(_flags(vars(arguments(config))))


def _flags(given: Mapping[str, Any]) -> Iterator[str]:
    for name, default in _NOT_TAKEN.items():
        value = given.get(name, default)
        if value == default:
            continue
        yield "--no-bias-gelu-fusion" if name == "bias_gelu_fusion" else _flag(name, value)


def _in_words(name: str, value: Any) -> str:
    if name == "bias_gelu_fusion":
        return f"{'without' if value else 'with'} --no-bias-gelu-fusion"
    return f"without {_flag(name, True)}" if value in (None, False) else f"with {_flag(name, value)}"


def _flag(name: str, value: Any) -> str:
    flag = "--" + name.replace("_", "-")
    written = f"{value[0]},{value[1]}" if isinstance(value, tuple) else value
    return flag if value is True else f"{flag} {written}"
