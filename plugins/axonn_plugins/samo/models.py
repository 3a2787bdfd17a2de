"""Models by name, for counting: modules with the right parameters and no forward (000, Table 4.1)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path

from torch import nn

from axonn_plugins.config import ConfigError

_GPT3_VOCABULARY, _GPT3_CONTEXT = 50257, 2048


def gpt(layers: int, hidden: int, vocabulary: int, context: int = _GPT3_CONTEXT) -> nn.Module:
    """A GPT with learned positions, its output layer tied to the table of tokens."""
    block = lambda: nn.ModuleDict(  # noqa: E731
        {
            "ln1": nn.LayerNorm(hidden),
            "qkv": nn.Linear(hidden, 3 * hidden),
            "proj": nn.Linear(hidden, hidden),
            "ln2": nn.LayerNorm(hidden),
            "fc1": nn.Linear(hidden, 4 * hidden),
            "fc2": nn.Linear(4 * hidden, hidden),
        }
    )
    return nn.ModuleDict(
        {
            "tokens": nn.Embedding(vocabulary, hidden),
            "positions": nn.Embedding(context, hidden),
            "blocks": nn.ModuleList(block() for _ in range(layers)),
            "norm": nn.LayerNorm(hidden),
        }
    )


def vgg19() -> nn.Module:
    """VGG-19 for 1,000 classes of images of 224 x 224, without normalisation."""
    layers: list[nn.Module] = []
    channels = 3
    for width, repeats in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(repeats):
            layers.append(nn.Conv2d(channels, width, 3, padding=1))
            channels = width
    return nn.Sequential(*layers, nn.Linear(512 * 7 * 7, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 1000))


def wide_resnet101() -> nn.Module:
    """WideResnet-101-2 for 1,000 classes: ResNet-101 with the inner convolutions of its bottlenecks twice as wide."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, bias=False), nn.BatchNorm2d(64)]
    channels = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 23), (512, 3)):
        for block in range(blocks):
            layers += _convolution(channels, 2 * planes, 1) + _convolution(2 * planes, 2 * planes, 3)
            layers += _convolution(2 * planes, 4 * planes, 1)
            if block == 0:
                layers += _convolution(channels, 4 * planes, 1)
            channels = 4 * planes
    return nn.Sequential(*layers, nn.Linear(channels, 1000))


def _convolution(channels: int, width: int, size: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, width, size, bias=False), nn.BatchNorm2d(width)]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-3-XL": lambda: gpt(24, 2048, _GPT3_VOCABULARY),
    "GPT-3-2.7B": lambda: gpt(32, 2560, _GPT3_VOCABULARY),
    "GPT-3-6.7B": lambda: gpt(32, 4096, _GPT3_VOCABULARY),
    "GPT-3-13B": lambda: gpt(40, 5120, _GPT3_VOCABULARY),
    "VGG-19": vgg19,
    "WideResnet-101": wide_resnet101,
}
"""The models of Table 4.1. (GPT-3 13B with a hidden size of 5120, which its heads divide; 5140 is printed.)"""


def maker(name: str) -> Callable[[], nn.Module]:
    """Find the maker of the model of this name: one of `MODELS`, ``GPT:layers,hidden,vocabulary[,context]``, or HF's config.json.

    Raises:
        ConfigError: there is no such model.
    """
    plain = {_plain(known): known for known in MODELS}
    if _plain(name) in plain:
        return MODELS[plain[_plain(name)]]
    if name.lower().startswith("gpt:"):
        return _gpt(name)
    if name.endswith(".json") or "/" in name or Path(name).exists():
        return _hf(Path(name))
    near = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=0.0)[0]
    raise ConfigError(
        f'MODEL = "{name}" is not known; use "{plain[near]}", another of {", ".join(MODELS)}, '
        "GPT:layers,hidden,vocabulary or the path of a config.json"
    )


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower()


def _gpt(name: str) -> Callable[[], nn.Module]:
    sizes = name.partition(":")[2].split(",")
    most = (10_000, *[9_999_999] * 3)  # layers are made one by one
    if len(sizes) not in (3, 4) or not all(
        re.fullmatch(r"\s*[0-9]{1,7}\s*", size) and 0 < int(size) <= n for size, n in zip(sizes, most, strict=False)
    ):
        raise ConfigError(
            f'MODEL = "{name}" does not give the sizes of a GPT; write GPT:layers,hidden,vocabulary or '
            "GPT:layers,hidden,vocabulary,context in whole numbers from 1 to 9,999,999, of at most 10,000 layers, such as "
            "GPT:24,2048,50257"
        )
    numbers = [int(size) for size in sizes]
    return lambda: gpt(*numbers)


def _hf(path: Path) -> Callable[[], nn.Module]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f'MODEL = "{path}": there is no file "{file}"; give the path of a model\'s config.json')
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    except ImportError:
        raise ConfigError(
            f'MODEL = "{path}" needs transformers to be read; install it, or use GPT:layers,hidden,vocabulary'
        ) from None
    # What transformers raises on a configuration that it cannot use is of many kinds.
    try:
        config = AutoConfig.from_pretrained(file, trust_remote_code=False)
    except Exception as error:
        raise _unusable(path, error) from None
    kind = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModel

    def make() -> nn.Module:
        try:
            return kind.from_config(config)
        except Exception as error:
            raise _unusable(path, error) from None

    return make


def _unusable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f'MODEL = "{path}" is not a configuration that transformers can use: {" ".join(str(error).split())}'
    )
