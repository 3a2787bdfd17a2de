"""HF's folders: a configuration, and safetensors files with an index."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from axonn_plugins.config import ConfigError
from axonn_tp.checkpoint.serial import write_safetensors
from axonn_tp.grid.lazy import recording

_WINDOWED = ("mistral", "mixtral", "qwen2", "qwen3")
"""Types of models that obey ``sliding_window``, of those that are converted to other names."""


def library() -> Any:
    """The package transformers.

    Raises:
        ConfigError: it is not here.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"Hugging Face's configurations need transformers, which cannot be imported ({error}); install it, or convert in an environment that has it"
        ) from None


def configuration(folder: Path) -> Any:
    """The configuration in a folder; None where it has none.

    Raises:
        ConfigError: transformers cannot use it.
    """
    file = folder / "config.json"
    if not file.is_file():
        return None
    kind = library().AutoConfig
    # What transformers raises on a configuration that it cannot use is of many kinds.
    try:
        return kind.from_pretrained(file, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(
            f"{file} is not a configuration that transformers can use: {' '.join(str(error).split())}"
        ) from None


def class_of(config: Any) -> Any:
    """The class of the model.

    Raises:
        ConfigError: transformers has none.
    """
    transformers = library()
    named = (config.architectures or [None])[0]
    if named is None and type(config) in transformers.AutoModelForCausalLM._model_mapping:
        return transformers.AutoModelForCausalLM._model_mapping[type(config)]
    kind = None if named is None else getattr(transformers, named, None)
    if kind is None:
        raise ConfigError(f'config.json: architectures = "{named}" is no model of transformers; correct it')
    return kind


def bare_model(config: Any) -> Any:
    """The model on the meta device.

    Raises:
        ConfigError: its sizes are none.
    """
    try:
        with torch.device("meta"):
            return class_of(config)._from_config(config)
    except (RuntimeError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"config.json: no model can be made of it: {' '.join(str(error).split())}; correct it"
        ) from error


def loaded(config: Any, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The model with tensors by the names of HF's files, which stay unread.

    Raises:
        ConfigError: tensors are missing, or there are others, or they have other shapes, or are quantized.
    """
    quantized: Any = getattr(config, "quantization_config", None)
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ConfigError(
            f'config.json: quantization_config.quant_method = "{method}" is of weights in few bits, which are not read here; give the folder that the model '
            "was quantized from, or save it after model.dequantize()"
        )
    bare_model(config)  # whose mistakes are the configuration's
    with recording(), _bars_on_terminals():
        model, told = class_of(config).from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            dtype=dtype_of(tensors),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if told.get(what):
            raise ConfigError(
                f"the weights do not fit config.json: {what.replace('_', ' ')} {min(map(_said, told[what]))}; give the model's own --config"
            )
    return model


@contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """Within, transformers draws its progress on terminals alone."""
    said = library().utils.logging
    quiet = said.is_progress_bar_enabled() and not sys.stderr.isatty()
    if quiet:
        said.disable_progress_bar()
    try:
        yield
    finally:
        if quiet:
            said.enable_progress_bar()


def _said(key: Any) -> str:
    """A name, which transformers gives with shapes where they differ."""
    return key if isinstance(key, str) else f"{key[0]}, {tuple(key[1])} and not {tuple(key[2])}"


def window_of(config: Any) -> int | None:
    """Tokens that a token sees, itself among them, in every layer; None: all before it.

    Raises:
        ConfigError: layers differ.
    """
    # Others pass over the key, which a model that was renamed may have left.
    size = getattr(config, "sliding_window", None) if config.model_type in _WINDOWED else None
    kinds = set(getattr(config, "layer_types", None) or ())
    if size is None or size >= config.max_position_embeddings or kinds == {"full_attention"}:
        return None
    if len(kinds) > 1:
        raise ConfigError(
            f"config.json: layer_types = {', '.join(sorted(kinds))} differ, and a sliding_window is converted that all layers have"
        )
    return int(size)


def dtype_of(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The type of most of a model's numbers.

    Raises:
        ConfigError: there are none.
    """
    numbers: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        numbers[tensor.dtype] += tensor.numel() if tensor.is_floating_point() else 0
    if not numbers.total():
        raise ConfigError("there are no weights in floating point; give the folder of a model")
    return numbers.most_common(1)[0][0]


def in_file_names(tensors: Mapping[str, Tensor], config: Any, folder: Path) -> dict[str, Tensor]:
    """Tensors of a model in memory as HF's files have them: without what is tied, and in the pieces of older versions.

    Raises:
        ConfigError: they are not of the model.
    """
    model = bare_model(config)
    _compare(tensors, model.state_dict(), folder)
    tied = getattr(model, "all_tied_weights_keys", {})
    kept = {name: tensor for name, tensor in tensors.items() if not _is_tied(tensors, name, tied)}
    from transformers.core_model_loading import revert_weight_conversion

    with recording():
        return revert_weight_conversion(model, kept)


def check(tensors: Mapping[str, Tensor], config: Any, folder: Path) -> None:
    """See that tensors by the names of HF's files are those of the model; what it ties may be left out.

    Raises:
        ConfigError: they are not.
    """
    from transformers.core_model_loading import revert_weight_conversion

    model = bare_model(config)
    tied = getattr(model, "all_tied_weights_keys", {}).keys() - tensors.keys()
    kept = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    _compare(tensors, revert_weight_conversion(model, kept), folder)


def _compare(tensors: Mapping[str, Tensor], model: Mapping[str, Tensor], folder: Path) -> None:
    for name in sorted(model.keys() ^ tensors.keys()):
        where = "lacks" if name in model else "has"
        raise ConfigError(f"{folder} {where} {name}, unlike the model of config.json; give the model's own --config")
    for name, tensor in tensors.items():
        shape, expected = tuple(tensor.shape), tuple(model[name].shape)
        if shape != expected:
            raise ConfigError(
                f"{name} is {shape} in {folder} and {expected} by config.json; give the model's own --config"
            )


def _is_tied(tensors: Mapping[str, Tensor], name: str, tied: Mapping[str, str]) -> bool:
    return name in tied and tensors[name].source is tensors[tied[name]].source  # type: ignore[attr-defined]


def untie_if_different(config: Any, tensors: dict[str, Tensor], head: str, table: str) -> None:
    """Leave out an output layer that equals the table that the configuration ties it to; else say there that it is not tied."""
    if getattr(config, "tie_word_embeddings", False) and head in tensors:
        if torch.equal(tensors[head], tensors[table]):
            del tensors[head]
        else:
            config.tie_word_embeddings = False


def write(tensors: Mapping[str, Tensor], config: Any, folder: Path, shard_bytes: int) -> list[Path]:
    """Write an HF folder, a tensor at a time.

    Args:
        tensors: by the names of HF's files.
        config: HF's configuration; None: the folder has none.
        folder: where to.
        shard_bytes: a file has no more, unless it is of one tensor.

    Returns:
        The files of weights.
    """
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    files = [folder / name for name in (names if len(names) > 1 else ["model.safetensors"])]
    for file, shard in zip(files, shards, strict=True):
        write_safetensors(file, shard)
    if len(files) > 1:
        weight_map = {name: file.name for file, shard in zip(files, shards, strict=True) for name in shard}
        total = {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
        index = {"metadata": total, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    if config is not None:
        write_configuration(config, tensors, folder)
    return files


def write_configuration(config: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write config.json of a model of these tensors."""
    if not config.architectures:
        config.architectures = [class_of(config).__name__]
    config.dtype = dtype_of(tensors)
    config.save_pretrained(folder)
