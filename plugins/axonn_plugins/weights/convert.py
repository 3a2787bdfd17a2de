"""From one format of weights to another: tensors are renamed unread, then read and written one at a time."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from axonn_plugins.config import ConfigError
from axonn_plugins.observe.clock import elapsed
from axonn_plugins.weights import hf, litgpt, megatron, megatron_told
from axonn_plugins.weights.source import Weights, open_weights
from axonn_tp.checkpoint import CheckpointError
from axonn_tp.checkpoint.planner import Shard
from axonn_tp.checkpoint.ranks import Ranks
from axonn_tp.checkpoint.state import Notes
from axonn_tp.checkpoint.training import write
from axonn_tp.grid.layout import Layout

_SIDE = ("*config.json", litgpt.SETTINGS, "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt")
_SIDE_TOO = ("added_tokens.json", "chat_template.*", "*.model", "*.spm", "*.tiktoken", "tekken.json")


def convert(source: Path, target: Path, to: str, shard_bytes: int, config: Path | None = None) -> str:
    """Write the weights of a folder in another format, with the configuration and tokenizer beside them.

    Args:
        source: the folder.
        target: a folder that is not there; complete or absent.
        to: "hf", "litgpt", "megatron" or "axonn".
        shard_bytes: a safetensors file of "hf" has no more.
        config: see `open_weights`.

    Returns:
        What was done, in words.

    Raises:
        ConfigError: a mistake of the user's, or what cannot be mapped.
    """
    if target.exists():
        raise ConfigError(f"{target} is there already; name a folder that is not")
    weights = open_weights(source, config)
    aside = target.with_name(f"{target.name}.incomplete")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        with elapsed("converting", partial(_share, aside, sum(tensor.nbytes for tensor in weights.tensors.values()))):
            tensors = _WRITERS[to](weights, aside, shard_bytes)
        _copy_side_files(weights.beside, aside)
        aside.rename(target)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{target} cannot be made: {error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    size = sum(tensor.nbytes for tensor in tensors.values()) / 2**30
    done = f"{source} ({weights.format}) -> {target} ({to}): {len(tensors)} tensors, {size:.2f} GiB{_cast(weights.tensors, tensors)}"
    flags = megatron_told.flags(weights.configuration()) if to == "megatron" else ""
    return f"{done}; besides --use-checkpoint-args the script needs {flags}" if flags else done


def _share(folder: Path, whole: int) -> float:
    """The share of so many bytes that files of a folder have."""
    found = 0
    for file in folder.rglob("*"):
        with suppress(OSError):  # it was renamed meanwhile
            found += file.stat().st_size
    return min(found / max(whole, 1), 1.0)


def _cast(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> str:
    """Types that tensors no longer have, in words."""
    kept = {tensor.dtype for tensor in after.values()}
    lost = {tensor.dtype for tensor in before.values()} - kept
    return f"; {', '.join(sorted(map(str, lost)))} became {', '.join(sorted(map(str, kept)))}" if lost else ""


def _copy_side_files(folder: Path, target: Path) -> None:
    """Configurations and tokenizers that the target has not."""
    for pattern in (*_SIDE, *_SIDE_TOO):
        for file in folder.glob(pattern):
            if file.is_file() and not (target / file.name).exists():
                shutil.copy(file, target)


def _to_hf(weights: Weights, target: Path, shard_bytes: int) -> Mapping[str, Tensor]:
    config, tensors = None, weights.tensors
    nameless = weights.format == "axonn" and weights.names == "hf" and hf.configuration(weights.beside) is None
    if weights.format != "hf" and not nameless:  # a plain model's names are its own
        config, tensors = weights.in_hf_names()
    hf.write(tensors, config, target, shard_bytes)
    return tensors


def _to_litgpt(weights: Weights, target: Path, shard_bytes: int) -> Mapping[str, Tensor]:
    config, tensors = None, weights.tensors
    if weights.names != "litgpt":
        config, tensors = weights.in_hf_names()
    if config is None:
        own = litgpt.own_configuration(weights.beside)
    else:
        own = litgpt.of_model(weights.beside, config)
        tensors = litgpt.from_hf(tensors, own)
    litgpt.write(tensors, own, target)
    return tensors


def _to_megatron(weights: Weights, target: Path, shard_bytes: int) -> Mapping[str, Tensor]:
    config, tensors = weights.in_hf_names()
    tensors = megatron.from_hf(tensors, config)
    megatron.write(tensors, config, target)
    return tensors


def _to_axonn(weights: Weights, target: Path, shard_bytes: int) -> Mapping[str, Tensor]:
    """Write a checkpoint by the names of the model that loads it: LitGPT's own, or HF's in memory."""
    tensors = weights.tensors
    if weights.names == "megatron" or weights.format == "hf":
        config, named = weights.in_hf_names()
        tensors = hf.loaded(config, named).state_dict()
        if weights.format != "hf":
            hf.write_configuration(config, named, target)
    shards: dict[str, Shard] = {}
    first: dict[int, str] = {}
    notes: Notes = {"aliases": {}, "modules": {}}
    for name, tensor in tensors.items():
        source: Any = getattr(tensor, "source", tensor)
        if (known := first.setdefault(id(source), name)) != name:
            notes["aliases"][name] = known
        else:
            shards[f"model.{name}"] = Shard(tensor, Layout(tuple(tensor.shape)))
    write(target / "axonn", shards, {"model": notes, "extra": None, "random": None}, Ranks(None))
    return tensors


_WRITERS = {"hf": _to_hf, "litgpt": _to_litgpt, "megatron": _to_megatron, "axonn": _to_axonn}
