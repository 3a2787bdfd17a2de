"""The small Llama of the examples with the HF Trainer, and how they read their command lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed


def untrained(seed: int = 0) -> LlamaForCausalLM:
    """The model with its first weights; where somebody has one, `LlamaForCausalLM.from_pretrained`."""
    set_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4)
    )


def asked(arguments: Sequence[str] | None, said: str | None, **defaults: Any) -> TrainingArguments:
    """Options of a command line, all those of TrainingArguments.

    Args:
        arguments: what stands behind the command; None: this process'.
        said: of the command, for --help.
        defaults: what options have that are not given.
    """
    parser = HfArgumentParser([TrainingArguments], description=said)  # type: ignore[list-item]
    parser.set_defaults(max_steps=40, logging_steps=10, report_to=["none"], disable_tqdm=True, **defaults)
    (options,) = parser.parse_args_into_dataclasses(arguments)
    return options


@torch.no_grad()
def loss_of(model: nn.Module, text: Tensor) -> float:
    """Loss of a model in this process, in nats a byte."""
    return model.eval()(text, labels=text).loss.item()
