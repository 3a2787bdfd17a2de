"""What a run of the benchmark is, read from the command line and checked before anything is made."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass

import torch

from axonn_plugins.config import ConfigError
from axonn_recipes.models.gpt import GPTConfig
from axonn_recipes.options import add_numbers, add_run, at_least_one

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
_HEAD = 64


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is measured.

    Attributes:
        parameters: at least so many in the GPT's blocks.
        hidden: features of its residual stream; a block has 12 hidden² parameters.
        sparsity: share of every matrix that is pruned, at random.
        dtype: of parameters and gradients, a name of `DTYPES`.
        device: "cpu" or "cuda".
        batch: sequences of a forward and backward pass.
        context: tokens a sequence.
        rounds: timed turns of every side.
        passes: timed turns of forward and backward; 0: only steps are measured.
        copy_bytes: of the vector whose copy says what the memory can do.
    """

    parameters: int
    hidden: int
    sparsity: float
    dtype: str
    device: str
    batch: int
    context: int
    rounds: int
    passes: int
    copy_bytes: int
    seed: int = 1

    @property
    def model(self) -> GPTConfig:
        """Sizes of the model."""
        layers = math.ceil(self.parameters / (12 * self.hidden**2))
        return GPTConfig(256, self.context, layers, self.hidden // _HEAD, self.hidden)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="axonn bench samo",
        description="SAMO's step beside a dense one, and its compression within backward, in one run.",
    )
    made.add_argument("--parameters", default="32M", help="at least so many, such as 32M or 1B (default %(default)s)")
    made.add_argument("--sparsity", type=float, default=0.9, help="share that is pruned (default %(default)s)")
    made.add_argument("--dtype", default="bf16", help=f"one of {', '.join(DTYPES)} (default %(default)s)")
    made.add_argument("--device", help="cpu or cuda (default cuda where there is one)")
    add_numbers(
        made,
        (
            ("hidden", 512, f"features of the residual stream, a multiple of {_HEAD}"),
            ("batch", 8, "sequences of a forward and backward pass"),
            ("context", 256, "tokens a sequence"),
            ("rounds", 15, "timed turns of every side"),
            ("passes", 5, "timed turns of forward and backward; 0 measures steps only"),
            ("copy-mib", 512, "size of the vector whose copy says what the memory can do"),
        ),
    )
    add_run(made, "bench_samo")
    return made


def resolve(options: argparse.Namespace) -> Settings:
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
    if options.dtype not in DTYPES:
        raise ConfigError(f"--dtype {options.dtype} is not known; choose from {', '.join(DTYPES)}")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device} is not known; choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a CUDA device, and torch sees none; choose cpu")
    return Settings(
        _count(options.parameters),
        options.hidden,
        options.sparsity,
        options.dtype,
        device,
        options.batch,
        options.context,
        options.rounds,
        options.passes,
        options.copy_mib * 2**20,
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
