"""Arguments to call a model with, guessed from its own description, when nobody says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from axonn_tp.layers.linear_split import features

Arguments = tuple[tuple, dict[str, Any]]
_ROWS = (2, 5)


def as_arguments(inputs: Any) -> Arguments:
    """`inputs` as positional and keyword arguments: a mapping names them, a tuple lists them."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def guesses(model: nn.Module) -> Iterator[Arguments]:
    """Small inputs that `model` may take, the likeliest first."""
    generator = torch.Generator().manual_seed(2)
    vocabulary = min([m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)], default=0)
    ids = torch.randint(max(vocabulary, 1), _ROWS, generator=generator)
    if hasattr(model, "main_input_name") and hasattr(model, "config"):
        yield from _published(model, ids, generator)
    if vocabulary:
        yield (ids,), {}
        yield (ids, ids.flip(1)), {}  # and their targets, where a model gives its loss
    channels = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if channels is not None:
        for size in (16, 32, 64, 224):
            yield (torch.randn(2, channels, size, size, generator=generator),), {}
    yield from rows(model)


def rows(module: nn.Module) -> Iterator[Arguments]:
    """Activations as wide as what the first linear or norm inside takes."""
    generator = torch.Generator().manual_seed(3)
    widths = [size[0] for m in module.modules() if (size := features(m))]
    for width in dict.fromkeys(widths[:3]):
        yield (torch.randn(*_ROWS, width, generator=generator),), {}


def _published(model: Any, ids: Tensor, generator: torch.Generator) -> Iterator[Arguments]:
    """From what an HF transformers model says of itself: its main input alone, then all kinds that its forward takes."""
    config = model.config
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 224)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    mel = getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 100)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    known = {
        "input_ids": ids,
        "decoder_input_ids": ids.flip(1),
        "pixel_values": randn(_ROWS[0], getattr(vision, "num_channels", 3), height, width),
        "input_features": randn(_ROWS[0], *mel),
        "input_values": randn(_ROWS[0], 2000),
    }
    decodes = {"decoder_input_ids"} if getattr(config, "is_encoder_decoder", False) else set()
    names = {model.main_input_name} | decodes
    yield (), {name: value for name, value in known.items() if name in names}
    names = set(signature(model.forward).parameters)
    yield (), {name: value for name, value in known.items() if name in names}
