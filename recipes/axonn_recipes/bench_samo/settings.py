"""Settings of a run of the benchmark, read from the command line and checked before anything is made."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Literal

import torch

from axonn_plugins.config import ConfigError
from axonn_recipes.models.gpt import GPTConfig
from axonn_recipes.options import Run, at_least_one

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
_HEAD = 64


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A GPT, and how often its steps are timed.

    Attributes:
        hidden: features of the residual stream, a multiple of 64; a block has 12 hidden² parameters.
        sparsity: share of every matrix that is pruned, at random.
        dtype: of parameters and gradients.
        batch: sequences of a forward and backward pass.
        context: tokens a sequence.
        rounds: timed turns of every side.
        passes: timed turns of forward and backward; 0 measures steps only.
    """

    hidden: int = 512
    sparsity: float = 0.9
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    batch: int = 8
    context: int = 256
    rounds: int = 15
    passes: int = 5


@dataclass(frozen=True, kw_only=True)
class Options(Sizes, Run):
    """SAMO's step beside a dense one, and its compression within backward, in one run.

    Attributes:
        parameters: at least so many in the GPT's blocks, such as 32M or 1B.
        device: cpu or cuda; by itself cuda where there is one.
        copy_mib: size of the vector whose copy says what the memory can do.
    """

    parameters: str = "32M"
    device: Literal["cpu", "cuda"] | None = None
    copy_mib: int = 512


@dataclass(frozen=True, kw_only=True)
class Settings(Sizes):
    """Everything that decides what is measured.

    Attributes:
        parameters: at least so many in the GPT's blocks.
        device: "cpu" or "cuda".
        copy_bytes: of the vector whose copy says what the memory can do.
    """

    parameters: int
    device: str
    copy_bytes: int
    seed: int = 1

    @property
    def model(self) -> GPTConfig:
        """Sizes of the model."""
        layers = math.ceil(self.parameters / (12 * self.hidden**2))
        return GPTConfig(256, self.context, layers, self.hidden // _HEAD, self.hidden)


def resolve(options: Options) -> Settings:
    """The run that the command line asks for.

    Raises:
        ConfigError: the first mistake.
    """
    at_least_one(options, "hidden", "batch", "context", "rounds", "copy_mib")
    if options.passes < 0:
        raise ConfigError(f"--passes {options.passes} is negative; give 0 or more")
    if options.hidden % _HEAD:
        raise ConfigError(f"--hidden {options.hidden} does not divide into heads of {_HEAD}; choose a multiple")
    if not 0 <= options.sparsity <= 1:
        raise ConfigError(f"--sparsity {options.sparsity} is not a share; give a number from 0 to 1")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a CUDA device, and torch sees none; choose cpu")
    return Settings(
        parameters=_count(options.parameters),
        device=device,
        copy_bytes=options.copy_mib * 2**20,
        **{field.name: getattr(options, field.name) for field in fields(Sizes)},
    )


def _count(text: str) -> int:
    found = re.fullmatch(r"([1-9]\d*)([KMB]?)", text)
    if not found:
        raise ConfigError(f"--parameters {text} is not a number of parameters; write it as in 32M or 1B")
    return int(found[1]) * _UNITS[found[2]]


def described(settings: Settings) -> str:
    """The run in words."""
    model = settings.model
    return "\n".join(
        [
            f"GPT: {model.layers} layers, hidden {model.hidden}, {settings.dtype} on {settings.device}, "
            f"{settings.sparsity:.1%} of every matrix pruned",
            f"steps: {settings.rounds} timed rounds, in turns",
            f"forward and backward: {settings.passes} timed rounds of {settings.batch} x {settings.context} tokens",
        ]
    )
