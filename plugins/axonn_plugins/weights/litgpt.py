"""LitGPT's folders: lit_model.pth and model_config.yaml. Names are mapped by LitGPT's own functions, on unread tensors."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from axonn_plugins.config import ConfigError
from axonn_plugins.weights import hf
from axonn_tp.grid.lazy import Cut, LazyTensor, Source, recording, whole

FILE, SETTINGS = "lit_model.pth", "model_config.yaml"
_FAMILIES = {
    **{"falcon": "falcon", "gemma-2": "gemma_2", "gemma-3": "gemma_3", "phi": "phi", "qwen2.5": "qwen_2_5"},
    **{"qwq": "qwen_2_5", "olmo-2-": "olmo2", "qwen3": "qwen_3"},
}
"""LitGPT's functions by how a model's name begins; the others go by the kind of MLP."""
_NAMES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2.5", "qwen3": "Qwen3", "mixtral": "Mixtral"}
"""Names that models of HF's types get here, so that LitGPT takes the right functions."""
_LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"}
_PLAIN = {
    **{"bias": False, "norm_class_name": "RMSNorm", "parallel_residual": False, "rotary_percentage": 1.0},
    **{"norm_1": True, "norm_2": True, "post_attention_norm": False, "post_mlp_norm": False},
    **{"shared_attention_norm": False, "norm_qk_type": "default", "lm_head_bias": False, "scale_embeddings": False},
    **{"attention_scores_scalar": None, "attention_logit_softcapping": None, "final_logit_softcapping": None},
    **{"rope_condense_ratio": 1, "rope_interleave": False, "rope_local_base_freq": None, "latent_attention": None},
    **{"n_shared_expert": None, "n_expert_groups": None, "first_k_dense_replace": None, "routed_scaling_factor": 1.0},
}
"""LitGPT's settings with which HF's models of these types compute the same."""


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"litgpt.{name}")
    except ImportError as error:
        raise ConfigError(f"LitGPT's folders need litgpt, which cannot be imported ({error}); install it") from None


def tensors(folder: Path) -> dict[str, LazyTensor]:
    """The tensors of a folder, unread.

    Raises:
        ConfigError: the file cannot be read, or is of adapters.
    """
    file = folder / FILE
    try:
        held = _module("utils").lazy_load(file)
        if not isinstance(held, dict):
            raise ConfigError(f"{file} holds a {type(held).__name__} and not weights by name; give LitGPT's own folder")
        held = held.get("model", held)
        _module("scripts.convert_lit_checkpoint").check_conversion_supported(held)
    except ConfigError:
        raise
    except Exception as error:
        damaged = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
        why = "is no file of torch's, or damaged; restore it" if damaged else f"cannot be converted: {error}"
        raise ConfigError(f"{file} {' '.join(why.split())}") from None
    known: dict[tuple, LazyTensor] = {}

    def lazy(name: str, stored: Any) -> LazyTensor:
        # Tensors that share their storage are one.
        place = (stored.storageinfo[2], *map(str, stored.rebuild_args[:3]))
        if place not in known:

            def read(cut: Cut | None) -> Tensor:
                tensor = stored._load_tensor().detach()
                return tensor if cut is None else tensor[cut]

            known[place] = LazyTensor(stored.metatensor.detach(), Source(read, f"{name} in {file.name}"))
        return known[place]

    return {name: lazy(name, stored) for name, stored in held.items()}


def own_configuration(folder: Path, config: Any = None) -> Any:
    """LitGPT's configuration in a folder, or made of HF's.

    Raises:
        ConfigError: there is none.
    """
    kind = _module("config").Config
    if (folder / SETTINGS).is_file():
        try:
            return kind.from_file(folder / SETTINGS)
        except Exception as error:
            raise ConfigError(
                f"{folder / SETTINGS} is not a configuration of LitGPT: {' '.join(str(error).split())}"
            ) from None
    for name in {folder.name, Path(getattr(config, "name_or_path", "") or "").name} - {""}:
        try:
            return kind.from_name(name)
        except ValueError:
            continue
    if config is None or config.model_type not in _NAMES:
        of = "" if config is None else f" of a {config.model_type}"
        raise ConfigError(
            f"LitGPT's {SETTINGS}{of} is not in {folder} and cannot be told; give --config, a folder with it, or name the folder as LitGPT names the "
            "model"
        )
    return kind(**_of_hf(config))


def _of_hf(config: Any) -> dict[str, Any]:
    rope = dict(config.rope_parameters or {})
    if rope.get("rope_type", "default") not in ("default", "linear", "llama3"):
        raise ConfigError(
            f'config.json: rope_type = "{rope["rope_type"]}" is not known to LitGPT; give --config, a folder with its {SETTINGS}'
        )
    base = rope.get("rope_theta", 10000)
    if base != int(base):
        raise ConfigError(f"config.json: rope_theta = {base} is not a whole number, as LitGPT's rope_base is")
    if config.hidden_act != "silu":
        raise ConfigError(
            f'config.json: hidden_act = "{config.hidden_act}" is not what LitGPT\'s LLaMAMLP computes, which is silu; give --config, a folder with '
            f"its {SETTINGS}"
        )
    heads, kind = config.num_attention_heads, config.model_type
    found = {
        "name": f"{_NAMES[kind]}-{config.num_hidden_layers}x{config.hidden_size}",
        "block_size": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": config.vocab_size,
        "n_layer": config.num_hidden_layers,
        "n_head": heads,
        "n_embd": config.hidden_size,
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "n_query_groups": config.num_key_value_heads,
        "rotary_percentage": 1.0,
        "parallel_residual": False,
        "bias": False,
        "attn_bias": kind == "qwen2" or bool(getattr(config, "attention_bias", False)),
        "norm_class_name": "RMSNorm",
        "norm_eps": config.rms_norm_eps,
        "norm_qk": kind == "qwen3",
        "mlp_class_name": "LLaMAMoE" if kind == "mixtral" else "LLaMAMLP",
        "intermediate_size": config.intermediate_size,
        "rope_base": int(base),
        "sliding_window_size": hf.window_of(config),
    }
    if kind == "mixtral":
        found |= {"n_expert": config.num_local_experts, "n_expert_per_token": config.num_experts_per_tok}
    if adjusted := _adjusted(rope):
        found["rope_adjustments"] = adjusted
    return found


def _adjusted(rope: Mapping[str, Any]) -> dict[str, Any]:
    """HF's scaled positions in LitGPT's terms; empty where they are not scaled."""
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return {}
    if kind == "linear":
        return {"factor": rope["factor"]}
    if kind != "llama3":
        return {"rope_type": kind}
    scaled = {key: rope[key] for key in ("factor", "low_freq_factor", "high_freq_factor")}
    return {**scaled, "original_max_seq_len": rope["original_max_position_embeddings"]}


def hf_configuration(config: Any, folder: Path) -> Any:
    """HF's configuration of a model in LitGPT's terms.

    Raises:
        ConfigError: it is of no family that is mapped here.
    """
    transformers = hf.library()
    types = {family: kind for kind, family in _NAMES.items()}
    kind = types.get(config.name.partition("-")[0], "llama")
    kind = "mixtral" if config.mlp_class_name == "LLaMAMoE" else kind
    windowed, adjusted = _windowed(config), set(config.rope_adjustments or ())
    kind = "mistral" if windowed and kind == "llama" else kind
    strange = [name for name, plain in _PLAIN.items() if getattr(config, name, plain) != plain]
    if config.mlp_class_name not in ("LLaMAMLP", "LLaMAMoE"):
        strange.append("mlp_class_name")
    if windowed is None or windowed and kind not in ("mistral", "mixtral"):
        strange.append("sliding_window_size")
    if adjusted and adjusted not in ({"factor"}, _LLAMA3):
        strange.append("rope_adjustments")
    if strange:
        raise ConfigError(
            f'{folder} has no config.json, and what "{config.name}" is in HF\'s terms is not known here, for its {strange[0]} = '
            f"{getattr(config, strange[0])}; give --config, an HF folder of the model"
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(config.rope_base)}
    if adjusted == {"factor"}:
        rope |= {"rope_type": "linear", **config.rope_adjustments}
    elif adjusted:
        given = dict(config.rope_adjustments)
        rope |= {"rope_type": "llama3", "original_max_position_embeddings": given.pop("original_max_seq_len"), **given}
    sizes = {
        "vocab_size": config.padded_vocab_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_query_groups,
        "head_dim": config.head_size,
        "max_position_embeddings": config.block_size,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": False,
    }
    if kind in ("mistral", "mixtral"):
        sizes["sliding_window"] = windowed or None  # HF's default for Mistral is one of 4096
    if kind == "mixtral":
        sizes |= {"num_local_experts": config.n_expert, "num_experts_per_tok": config.n_expert_per_token}
    if kind == "llama" and config.attn_bias:
        raise ConfigError(
            f'{folder} has no config.json, and "{config.name}" has biases in its attention; give --config, an HF folder'
        )
    return transformers.AutoConfig.for_model(kind, rope_parameters=rope, **sizes)


def _windowed(config: Any) -> int | None:
    """Tokens that a token sees in every layer, 0 for all before it; None: layers differ."""
    size = config.sliding_window_size
    if size is None or size >= config.block_size or not any(config.sliding_window_indices):
        return 0
    return size if all(config.sliding_window_indices) else None


def of_model(folder: Path, config: Any) -> Any:
    """LitGPT's configuration of the model that HF's is of: the one in the folder, or the one of its name where that computes the same, or made of HF's.

    Raises:
        ConfigError: there is none, or the folder's own is another model's.
    """
    own = own_configuration(folder, config)
    try:
        compare(own, config, folder)
    except ConfigError:
        if (folder / SETTINGS).is_file() or config.model_type not in _NAMES:
            raise
        return _module("config").Config(**_of_hf(config))
    return own


def compare(own: Any, config: Any, folder: Path) -> None:
    """Refuse a configuration of HF's that is another model's, which may have weights of the same sizes.

    Raises:
        ConfigError: names LitGPT's setting.
    """
    for name, (mine, theirs) in _settings(own, config).items():
        if mine != theirs:
            raise ConfigError(
                f"{folder} is of a model with {name} = {mine}, and the one of config.json has {theirs} there; give its own --config"
            )


def _settings(own: Any, config: Any) -> dict[str, tuple[Any, Any]]:
    """LitGPT's settings that change no weight's size, each beside that of HF's configuration, as far as this tells."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    told = {
        "n_head": getattr(config, "num_attention_heads", None),
        "n_query_groups": getattr(config, "num_key_value_heads", None),
        "head_size": getattr(config, "head_dim", None),
        "rope_base": rope.get("rope_theta"),  # of each kind of layer, where they differ
        "rotary_percentage": rope.get("partial_rotary_factor"),
        "parallel_residual": getattr(config, "use_parallel_residual", None),
    }
    found = {name: (getattr(own, name), value) for name, value in told.items() if value is not None}
    if config.model_type not in _NAMES:
        return found
    # Linear scaling is also said by a number of its own.
    plain = {name: value for name, value in _PLAIN.items() if name != "rope_condense_ratio"}
    found = {name: (getattr(own, name, value), value) for name, value in plain.items()} | found
    found["norm_eps"] = own.norm_eps, config.rms_norm_eps
    linear = {} if own.rope_condense_ratio == 1 else {"factor": own.rope_condense_ratio}
    found["rope_adjustments"] = {**(own.rope_adjustments or {}), **linear}, _adjusted(rope)
    most, mine = min(own.block_size, config.max_position_embeddings), _windowed(own)
    windows: list[int | str] = ["of some layers" if mine is None else mine, hf.window_of(config) or 0]
    windows = [size if isinstance(size, str) or size < most else 0 for size in windows]
    found["sliding_window_size"] = windows[0], windows[1]
    if config.model_type == "mixtral":
        found["n_expert_per_token"] = own.n_expert_per_token, config.num_experts_per_tok
    return found


def _mapped(script: str, prefix: str, config: Any, given: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
    """Apply one of LitGPT's functions to tensors."""
    name = config.name.lower()
    family = next((function for start, function in _FAMILIES.items() if name.startswith(start)), None)
    if family is None:
        family = "llama" if config.mlp_class_name in ("LLaMAMLP", "GemmaMLP", "LLaMAMoE") else "gpt_neox"
    function = getattr(_module(f"scripts.{script}"), f"copy_weights_{prefix if family == 'llama' else ''}{family}")
    made: dict[str, Tensor] = {}
    known = {"config": config, "qkv_weights": {}, "state_dict": made, "untie_weights": False, what: given}
    taken = {key: value for key, value in known.items() if key in inspect.signature(function).parameters}
    try:
        with recording():
            function(**taken)
    except (KeyError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"LitGPT's own mapping of \"{config.name}\" has no place for the weights: {' '.join(str(error).split())}; give the model's --config"
        ) from None
    return made


def to_hf(given: Mapping[str, Tensor], own: Any, config: Any) -> tuple[Any, dict[str, Tensor]]:
    """HF's configuration and names."""
    made = _mapped("convert_lit_checkpoint", "", own, given, "lit_weights")
    if "lm_head.weight" in made:
        hf.untie_if_different(config, made, "lm_head.weight", "model.embed_tokens.weight")
    return config, made


def from_hf(given: Mapping[str, Tensor], own: Any) -> dict[str, Tensor]:
    """LitGPT's names.

    Raises:
        ConfigError: LitGPT has no such model, or it is another one than the configuration's.
    """
    import torch

    made = _mapped("convert_hf_checkpoint", "hf_", own, given, "hf_weights")
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in _module("model").GPT(own).state_dict().items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in made.items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            raise ConfigError(
                f"{name} is {shapes.get(name, 'missing')}, and {expected.get(name, 'not there')} in LitGPT's \"{own.name}\"; give the model's --config"
            )
    return made


def write(given: Mapping[str, Tensor], own: Any, folder: Path) -> list[Path]:
    """Write LitGPT's folder, a tensor at a time."""
    utils = _module("utils")
    aside, made = folder / f"{FILE}.incomplete", dict[str, Any]()
    stored: dict[int, Any] = {}
    with utils.incremental_save(aside) as saver:
        for name, tensor in given.items():
            if id(tensor) not in stored:
                values = whole(tensor).contiguous()
                # A storage is written as a whole.
                values = values if values.untyped_storage().nbytes() == values.nbytes else values.clone()
                stored[id(tensor)] = saver.store_early(values)
            made[name] = stored[id(tensor)]
        saver.save(made)
    aside.rename(folder / FILE)
    utils.save_config(own, folder)
    return [folder / FILE]
