"""torchtitan on gloo ranks of a CPU: the checkout that TORCHTITAN_PATH names, its Llama 3 debug model made small, random text.

torchtitan takes every machine for one with an accelerator, and its attention has no backward without one: what is replaced
here is that, and nothing of how a model is split, trained or saved.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

PATH = os.environ.get("TORCHTITAN_PATH", "")
if not os.path.isdir(os.path.join(PATH, "torchtitan")):
    pytest.skip("TORCHTITAN_PATH names no checkout of torchtitan", allow_module_level=True)
for _needed in ("tyro", "grain", "datasets", "spmd_types", "einops", "tokenizers"):
    if importlib.util.find_spec(_needed) is None:
        pytest.skip(f"torchtitan needs {_needed}", allow_module_level=True)
sys.path.append(PATH)

torch._utils._get_available_device_type = lambda: "cpu"
for _name, _answer in {
    "get_device_name": "cpu",
    "get_device_properties": SimpleNamespace(total_memory=2**30),
    "memory_stats": {},
    "reset_peak_memory_stats": None,
    "empty_cache": None,
}.items():
    setattr(torch.cpu, _name, lambda *_, answer=_answer: answer)

import torchtitan.trainer  # noqa: E402
from torchtitan.components.data.loader import BaseDataLoader  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.config.override import derive, override  # noqa: E402
from torchtitan.distributed import fsdp  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402

dist_utils.set_pg_timeouts = lambda **_: None
_undivided = fsdp.disable_fsdp_gradient_division


def _summed(model: torch.nn.Module) -> None:
    """Theirs, and no sums that gloo has not."""
    _undivided(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


fsdp.disable_fsdp_gradient_division = _summed
torchtitan.trainer.time = SimpleNamespace(perf_counter=lambda: 0.0, sleep=lambda _: None)
TOKENS, WORDS = 32, 2048
OURS = "axonn_plugins.hosts.torchtitan.axonn"


class Attention(Module):
    """Causal, by torch."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, *, enable_gqa: bool, **rest: Any) -> Tensor:
        q, k, v = (one.transpose(0, 1) for one in (q_TNH, k_TNH, v_TNH))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa).transpose(0, 1)


@override(target=FlexAttention.Config)
def attention(config: FlexAttention.Config) -> Attention.Config:
    return derive(config, Attention.Config)


class Text(BaseDataLoader):
    """Micro-batches of random words, dealt out in turn; some words are not to be predicted, in some more than in others."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        repeat: bool = True

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **rest: Any) -> None:
        self.at, self.readers, self.reader = 0, dp_world_size, dp_rank

    def __iter__(self) -> Iterator[Any]:
        while True:
            number = self.at * self.readers + self.reader
            self.at += 1
            words = torch.randint(WORDS, (TOKENS + 1,), generator=torch.Generator().manual_seed(number))
            labels = words[1:].masked_fill(torch.arange(TOKENS) % 5 < number % 4, -100)
            yield {"input": words[:-1], "positions": torch.arange(TOKENS)}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at * self.readers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"] // self.readers


def small() -> Any:
    """The debug model in two layers, with a step of four micro-batches."""
    config = llama3_debugmodel()
    del config.model_spec.model.layers[2:]
    config.hf_assets_path = os.path.join(PATH, "tests/assets/tokenizer")
    config.dataloader = Text.Config()
    config.training = replace(
        config.training,
        num_tokens_per_microbatch_per_dp_rank=TOKENS,
        num_tokens_per_train_step=4 * TOKENS,
        max_context_length=TOKENS,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
        max_norm=0.5,
        steps=3,
    )
    config.debug = replace(config.debug, seed=1, enable_structured_logging=False)
    config.validator = replace(config.validator, enable=True, freq=2, dataloader=Text.Config())
    return config


def trained(
    *arguments: str, overrides: tuple[str, ...] = (OURS,), change: Callable[..., Any] = lambda config: None
) -> dict[str, Any]:
    """Reports of a run of ``torchtitan.train``, by step; `change` is made to its configuration first."""
    chosen = ["--override.imports", f"{__name__}.attention", *overrides]
    config = ConfigManager().parse_args(["--module", __name__, "--config", "small", *arguments, *chosen])
    change(config)
    trainer = config.build()
    found: dict[str, Any] = {"steps": [], "validated": []}

    def log(step: int, mean: float, most: float, norm: float, extra_metrics: dict[str, Any]) -> None:
        found["steps"].append((step, mean, most, norm, int(extra_metrics["n_tokens_seen"])))

    trainer.metrics_processor.log = log
    trainer.metrics_processor.log_validation = lambda loss, step, **_: found["validated"].append((step, loss))
    try:
        trainer.train()
    finally:
        trainer.close()
    found["trainer"] = trainer
    return found
