"""Megatron's torch_dist folders of a GPTModel: names, fused matrices, and the arguments that Megatron keeps with them.

The files are torch.distributed.checkpoint's, so that neither Megatron nor a process group is needed to read and write them.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, SavePlan, WriteItem
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItemType

from axonn_plugins.config import ConfigError
from axonn_plugins.weights import hf, megatron_told
from axonn_plugins.weights.megatron_names import Rule, arguments, configuration, rules
from axonn_tp.checkpoint.lazily import of_pieces
from axonn_tp.checkpoint.planner import Place, SavePlanner, Shard
from axonn_tp.grid.layout import Layout
from axonn_tp.grid.lazy import Cut, LazyTensor, Source, recording

_LATEST, _COMMON, _BACKEND = "latest_checkpointed_iteration.txt", "common.pt", "metadata.json"
_PARTS = ("linear_qkv", "linear_proj", "core_attention")
_MODEL = re.compile(r"(embedding|decoder|output_layer|mtp|encoder)\.")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
"""HF's types of models that are a GPTModel."""


def iteration(folder: Path) -> Path | None:
    """The folder of torch_dist files: itself, or the latest iteration in it; None where there is none."""
    if (folder / _BACKEND).is_file() and (folder / ".metadata").is_file():
        return folder
    if not (folder / _LATEST).is_file():
        return None
    said = (folder / _LATEST).read_text(errors="replace").strip()
    place = folder / (said if not said.isdecimal() else f"iter_{int(said):07}")
    if not (place / _BACKEND).is_file():
        raise ConfigError(f"{place} is not of Megatron's format torch_dist; save with --ckpt-format torch_dist")
    return place


def tensors(folder: Path) -> dict[str, Tensor]:
    """The model's tensors, unread, of each layer by itself.

    Raises:
        ConfigError: the list of what is in the folder is missing or damaged.
    """
    reader = FileSystemReader(folder)
    try:
        metadata = reader.read_metadata()
    except Exception as error:  # what unpickling raises is of many kinds
        reason = "is missing" if isinstance(error, FileNotFoundError) else "cannot be read"
        raise ConfigError(f"{folder / '.metadata'} {reason}, and says what is in the folder; restore it") from None
    reader.set_up_storage_reader(metadata, True)
    found: dict[str, LazyTensor] = {}
    for name, kind in metadata.state_dict_metadata.items():
        if not isinstance(kind, TensorStorageMetadata) or not _MODEL.match(name):
            continue
        tensor = of_pieces(reader, metadata, name, kind.size, str(folder))
        stacked = re.match(r"(.*\.layers\.)(?!\d)(.*)", name)
        if stacked is None:
            found[name] = tensor
            continue
        for layer in range(kind.size[0]):
            found[f"{stacked[1]}{layer}.{stacked[2]}"] = _layer(tensor, layer)
    return dict(_joined(found))


def _layer(stacked: LazyTensor, layer: int) -> LazyTensor:
    shape = stacked.shape[1:]

    def read(cut: Cut | None) -> Tensor:
        cut = cut if cut is not None else tuple(slice(0, size) for size in shape)
        return stacked.source.read((slice(layer, layer + 1), *cut))[0]

    return LazyTensor(
        torch.empty(shape, dtype=stacked.dtype, device="meta"), Source(read, f"{layer} of {stacked.source.origin}")
    )


def _joined(found: Mapping[str, LazyTensor]) -> Iterator[tuple[str, Tensor]]:
    """Megatron may keep gate and up of a gated MLP apart, as NAME_w and NAME_v."""
    for name, tensor in found.items():
        if name.endswith("_w") and f"{name[:-1]}v" in found:
            with recording():
                yield name[:-2], torch.cat([tensor, found[f"{name[:-1]}v"]])
        elif not (name.endswith("_v") and f"{name[:-1]}w" in found):
            yield name, tensor


def _check(config: Any) -> None:
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f'model_type = "{config.model_type}" has no place in Megatron\'s GPTModel here; models of {", ".join(FAMILIES)} have, and others are '
            "converted to hf, litgpt and axonn"
        )


class _Missing(type):
    """The kind of classes that are not installed, with any member: some releases of Python 3.11 write an enum's as `getattr(class, name)`."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()


class _Unpickler(pickle.Unpickler):
    """Makes something of kinds that are not installed, such as Megatron's, which its arguments are also of."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: D102
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            return _Missing(name, (), {"__init__": lambda self, *arguments: None})


def _told(folder: Path) -> Any:
    """The arguments that Megatron kept; None where it kept none.

    Raises:
        ConfigError: the file cannot be read.
    """
    file = folder / _COMMON
    if not file.is_file():
        return None
    pickles = ModuleType("pickles")
    vars(pickles).update(Unpickler=_Unpickler, load=pickle.load)
    try:
        return torch.load(file, map_location="cpu", pickle_module=pickles, weights_only=False).get("args")
    except Exception as error:
        raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}") from None


def hf_configuration(folder: Path) -> Any:
    """HF's configuration of a model, by the arguments that Megatron kept; None where it kept none, or they are of no family here.

    Raises:
        ConfigError: they say what no HF model computes.
    """
    told = _told(folder)
    if told is None:
        return None
    megatron_told.check(told, folder)
    keys = configuration(megatron_told.known(told))
    if keys is None:
        return None
    from transformers import AutoConfig

    return AutoConfig.for_model(**keys)


def to_hf(given: Mapping[str, Tensor], config: Any, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """HF's configuration and names.

    Raises:
        ConfigError: the model has no place in Megatron's, or tensors are missing or unknown.
    """
    _check(config)
    if (told := _told(folder)) is not None:
        megatron_told.compare(told, config, folder)
    left, made = dict(given), dict[str, Tensor]()
    with recording():
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            if name in left:  # Megatron pads a vocabulary
                left[name] = left[name].narrow(0, 0, min(config.vocab_size, left[name].shape[0]))
        for rule in rules(config):
            if rule.ours in left:
                made |= zip(rule.theirs, _cut(rule, left.pop(rule.ours), folder), strict=True)
            elif not rule.optional:
                raise ConfigError(f"{folder} lacks {rule.ours}, unlike the model of config.json; give its own --config")
    if left:
        raise ConfigError(
            f"{folder} has {min(left)}, which has no place in the {config.model_type} of config.json; give its own --config"
        )
    table = next(rule.theirs[0] for rule in rules(config) if rule.ours == "embedding.word_embeddings.weight")
    hf.untie_if_different(config, made, "lm_head.weight", table)
    return config, made


def _cut(rule: Rule, tensor: Tensor, folder: Path) -> tuple[Tensor, ...]:
    try:
        return rule.split(tensor)
    except RuntimeError:  # torch, of sizes that it cannot cut so
        raise ConfigError(
            f"{rule.ours} is {tuple(tensor.shape)} in {folder}, unlike the model of config.json; give its own --config"
        ) from None


def from_hf(given: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Megatron's names, layer by layer.

    Raises:
        ConfigError: the model has no place in Megatron's, or tensors are missing or unknown.
    """
    _check(config)
    left, made = dict(given), dict[str, Tensor]()
    with recording():
        for rule in rules(config):
            missing = [name for name in rule.theirs if name not in left]
            if not missing:
                made[rule.ours] = rule.join(*(left.pop(name) for name in rule.theirs))
            elif not rule.optional:
                raise ConfigError(f"{missing[0]} is missing, unlike the model of config.json; give its own --config")
    # Older versions kept masks and frequencies, which are computed.
    unknown = [name for name in left if not re.search(r"(\.attn\.(masked_)?bias|inv_freq)$", name)]
    if unknown:
        raise ConfigError(f"{min(unknown)} has no place in Megatron's GPTModel")
    return made


class _Planner(SavePlanner):
    """Writes besides what Megatron's layers say of themselves, without which it does not load: nothing.

    Args:
        layers: how many the model has.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(Place())
        self._said = [
            f"decoder.layers.{module}._extra_state/shard_{layer}_{layers}"
            for module in ("mlp.linear_fc1", "mlp.linear_fc2", *(f"self_attention.{part}" for part in _PARTS))
            for layer in range(layers)
        ]

    def create_local_plan(self) -> SavePlan:  # noqa: D102
        said = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._said]
        self.plan = SavePlan([*super().create_local_plan().items, *said])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:  # noqa: D102
        return [None] if "._extra_state/" in index.fqn else super().lookup_object(index)


def write(given: Mapping[str, Tensor], config: Any, folder: Path) -> list[Path]:
    """Write a folder that Megatron's --load reads, a tensor at a time.

    Raises:
        ConfigError: Megatron has no argument for what the model computes.
    """
    told = arguments(config)
    place = folder / "release"
    place.mkdir(parents=True, exist_ok=True)
    shards = {name: Shard(tensor, Layout(tuple(tensor.shape))) for name, tensor in _stacked(given).items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(
            shards,  # type: ignore[arg-type]
            storage_writer=FileSystemWriter(place, per_thread_copy_ahead=0),  # one by one, as the planner reads
            planner=_Planner(config.num_hidden_layers),
            no_dist=True,
        )
    torch.save({"args": told, "iteration": 0, "checkpoint_version": 3.0}, place / _COMMON)
    backend = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    (place / _BACKEND).write_text(json.dumps(backend | {f"{name}_version": 1 for name in backend}))
    (folder / _LATEST).write_text("release")
    return sorted(place.glob("*.distcp"))


def _stacked(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of all layers as one, as Megatron has them."""
    layers: dict[str, list[Any]] = {}
    made: dict[str, Tensor] = {}
    for name, tensor in given.items():
        found = re.match(r"(.*\.layers\.)\d+\.(.*)", name)
        if found is None:
            made[name] = tensor
        else:
            layers.setdefault(f"{found[1]}{found[2]}", []).append(tensor)
    return made | {name: _stack(held, name) for name, held in layers.items()}


def _stack(held: list[LazyTensor], name: str) -> LazyTensor:
    def read(cut: Cut | None) -> Tensor:
        which, inner = (slice(None), None) if cut is None else (cut[0], cut[1:])
        return torch.stack([tensor.source.read(inner) for tensor in held[which]])

    like = torch.empty((len(held), *held[0].shape), dtype=held[0].dtype, device="meta")
    return LazyTensor(like, Source(read, name))
