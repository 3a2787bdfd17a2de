"""The models that are trained: a small GPT from nothing, or a checkpoint of HF."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from axonn_recipes.memorization.settings import HEADS, LAYERS
from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_tp.checkpoint import lazy_loading


class Model(Protocol):
    """A model as the study sees it."""

    @property
    def name(self) -> str:
        """Name in the results."""

    @property
    def labels(self) -> str:
        """The argument of its forward that has the labels."""

    @property
    def plan(self) -> Any:
        """The plan of its layers, as in the block."""

    def build(self) -> nn.Module:
        """The serial model, from torch's random numbers, or with weights that are still in their files."""

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        """The mean loss of pages (rows, tokens)."""

    def logits(self, model: nn.Module, rows: Tensor) -> Tensor:
        """Its logits for every token but the first: (rows, tokens - 1, vocabulary)."""


@dataclass(frozen=True)
class Small:
    """A GPT on bytes.

    Attributes:
        hidden: features of the residual stream.
        tokens: of a page.
    """

    hidden: int
    tokens: int

    labels = "targets"

    @property
    def name(self) -> str:  # noqa: D102
        return f"hidden-{self.hidden}"

    @property
    def plan(self) -> Mapping[str, Any]:  # noqa: D102
        return {
            **{"tokens": "embedding", "positions": "embedding", "*.ln?": "norm", "norm": "norm"},
            **{"*.qkv": {"kind": "normal", "parts": 3, "heads": HEADS}, "*.proj": "transposed"},
            **{"*.fc1": "normal", "*.fc2": "transposed", "head": "head", "loss": "loss"},
        }

    def build(self) -> nn.Module:  # noqa: D102
        return GPT(GPTConfig(256, self.tokens - 1, LAYERS, HEADS, self.hidden))

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:  # noqa: D102
        return model(rows[:, :-1], rows[:, 1:])

    def logits(self, model: nn.Module, rows: Tensor) -> Tensor:  # noqa: D102
        return model(rows[:, :-1])


@dataclass(frozen=True)
class Checkpoint:
    """A causal model of transformers, whose weights no rank reads but its own part.

    Attributes:
        folder: of config.json and safetensors.
        dtype: that it computes with.
    """

    folder: Path
    dtype: torch.dtype

    labels = "labels"
    plan = "auto"

    @property
    def name(self) -> str:  # noqa: D102
        return self.folder.resolve().name

    def build(self) -> nn.Module:  # noqa: D102
        from transformers import AutoModelForCausalLM

        with lazy_loading():
            model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype)
        model.config.use_cache = False
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:  # noqa: D102
        return model(input_ids=rows, labels=rows).loss

    def logits(self, model: nn.Module, rows: Tensor) -> Tensor:  # noqa: D102
        return model(input_ids=rows).logits[:, :-1]
