"""``axonn generate``: a model's continuation of a text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
from tyro import conf

from axonn_plugins.cli.options import read
from axonn_plugins.cluster.launch import launch
from axonn_plugins.config.base import ConfigError
from axonn_plugins.weights.generate import Sampling, as_rank, generate


@dataclass(frozen=True, kw_only=True)
class Options:
    """Continue a text by a model of an HF, LitGPT or Megatron folder or a checkpoint of ours, on a grid of ranks.

    By torchrun on its ranks, else on gx * gy * gz ranks of this machine.

    Attributes:
        prompt: the text.
        tokens: at most so many are made.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_p: the likeliest tokens that together have this probability are drawn from.
        seed: of the draws.
        gx: ranks that split the output features of a pair's first layers.
        gy: ranks that split their input features.
        gz: ranks that share out weights.
        config: a folder with the model's config.json and tokenizer, where FOLDER has none.
    """

    folder: Annotated[conf.Positional[Path], conf.arg(metavar="FOLDER", help="weights of any of these formats")]
    prompt: str
    tokens: int = 50
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    gx: int = 1
    gy: int = 1
    gz: int = 1
    config: Path | None = None

    def check(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ConfigError: names the option.
        """
        for name in ("tokens", "gx", "gy", "gz"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} = {getattr(self, name)} is not a number from 1; correct it")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(
                f"--temperature = {self.temperature} is not a number from 0; use 0 for the likeliest token"
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed = {self.seed} is not a number from 0 below 2**63; correct it")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p = {self.top_p} is not above 0 and at most 1; use 1 for all tokens")


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    options = read(Options, arguments, "axonn generate")
    options.check()
    ranks = options.gx * options.gy * options.gz
    if as_rank():
        _as_rank(options)
    elif ranks > 1:
        launch(_as_rank, ranks, options)
    else:
        _say(options)
    return 0


def _as_rank(options: Options) -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        _say(options)
    finally:
        dist.destroy_process_group()


def _say(options: Options) -> None:
    sampling = Sampling(options.temperature, options.top_p, options.seed)
    sizes = {"gx": options.gx, "gy": options.gy, "gz": options.gz}
    text = generate(options.folder, options.prompt, options.tokens, sampling, sizes, options.config)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)
