"""A folder of weights: whose format it is in, and its tensors by the names of HF's files, unread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from axonn_plugins.config import ConfigError
from axonn_plugins.weights import hf, litgpt, megatron
from axonn_tp.checkpoint import CheckpointError, lazy_tensors
from axonn_tp.checkpoint.files import MARKER


@dataclass
class Weights:
    """A model's weights.

    Attributes:
        folder: where they are.
        format: of the folder.
        names: whose names the tensors have, "hf", "litgpt" or "megatron".
        tensors: unread.
        beside: a folder with config.json, a tokenizer or model_config.yaml.
    """

    folder: Path
    format: str
    names: str
    tensors: Mapping[str, Tensor]
    beside: Path

    def configuration(self) -> Any:
        """HF's configuration of the model.

        Raises:
            ConfigError: it is nowhere, and cannot be told from what the format has.
        """
        found = hf.configuration(self.beside)
        if found is None and self.names == "litgpt":
            found = litgpt.hf_configuration(litgpt.own_configuration(self.beside), self.folder)
        if found is None and self.names == "megatron" and self.format == "megatron":
            found = megatron.hf_configuration(self.folder)
        if found is None:
            raise ConfigError(
                f"{self.folder} has no config.json, which says what model it is; give --config, an HF folder of the model"
            )
        return found

    def in_hf_names(self) -> tuple[Any, dict[str, Tensor]]:
        """HF's configuration of the model, and its tensors as in HF's files.

        Raises:
            ConfigError: they cannot be told.
        """
        config = self.configuration()
        if self.names in ("litgpt", "megatron"):
            if self.names == "litgpt":
                own = litgpt.own_configuration(self.beside, config)
                litgpt.compare(own, config, self.folder)
                config, tensors = litgpt.to_hf(self.tensors, own, config)
            else:
                config, tensors = megatron.to_hf(self.tensors, config, self.folder)
            hf.check(tensors, config, self.folder)
            return config, tensors
        if self.format == "axonn":
            return config, hf.in_file_names(self.tensors, config, self.folder)
        return config, dict(self.tensors)


def open_weights(folder: Path, config: Path | None = None) -> Weights:
    """Find out what a folder is, and name its tensors.

    Args:
        folder: the folder.
        config: a folder or file with the model's configuration, where that is not in `folder`.

    Raises:
        ConfigError: it is none of these formats, or is damaged.
    """
    if config is not None and not config.is_dir() and config.name not in ("config.json", litgpt.SETTINGS):
        raise ConfigError(
            f'--config = "{config}" is neither a folder nor a config.json or {litgpt.SETTINGS}; give the one of the model'
        )
    if config is not None and not config.exists():
        raise ConfigError(f'--config = "{config}" is not there; give the folder of the model')
    kind, found = _recognised(folder)
    beside = folder if config is None else (config.parent if config.is_file() else config)
    try:
        if kind == "litgpt":
            return Weights(found, kind, kind, litgpt.tensors(found), beside)
        if kind == "megatron":
            return Weights(found, kind, kind, megatron.tensors(found), beside)
        tensors = lazy_tensors(found)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    return Weights(found, kind, _names(tensors), tensors, beside)


def _recognised(folder: Path) -> tuple[str, Path]:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name one of weights")
    latest = folder / "latest"
    inside = folder / latest.read_text(errors="replace").strip("\0 \n") if latest.is_file() else folder
    for place in (inside, inside / "axonn"):
        if (place / MARKER).is_file():
            return "axonn", place
    if (folder / litgpt.FILE).is_file():
        return "litgpt", folder
    if (found := megatron.iteration(folder)) is not None:
        return "megatron", found
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").is_file():
        return "hf", folder
    raise ConfigError(
        f"{folder} holds none of an HF model's safetensors files, LitGPT's {litgpt.FILE}, Megatron's torch_dist files and a checkpoint of "
        "ours; name a folder that does"
    )


def _names(tensors: Mapping[str, Any]) -> str:
    """Whose names they are: a checkpoint of ours has those of the model that was trained."""
    if any(".attn.qkv." in name and name.startswith("transformer.h.") for name in tensors):
        return "litgpt"
    return "megatron" if any(name.startswith("decoder.layers.") for name in tensors) else "hf"
