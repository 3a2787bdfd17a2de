"""What a run is, read from the command line and checked before anything is started."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from typing import Any

from axonn_plugins.config import ConfigError
from axonn_recipes.models.gpt import GPTConfig
from axonn_recipes.options import add_run
from ted_moe import memory
from ted_moe.memory import Degrees, Transformer

SIDES = ("deepspeed", "ted")
DTYPES = ("fp32", "bf16")
SIZES = ("layers", "heads", "hidden", "context")


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of a run.

    Attributes:
        model: the base model.
        experts: in every second block.
        k: experts a token.
        ranks: GPUs, of either side.
        tensor: TED's tensor degree; DeepSpeed-MoE's is 1.
        expert: ranks that share the experts of a block.
        batch: windows a step, over all ranks.
        micro_batch: windows of a data-parallel rank at a time.
        steps: optimizer steps.
        lr: highest learning rate.
        dtype: one of `DTYPES`.
        tile_size: see the block's key.
        validate_every: steps between validations.
        validation_batches: batches to validate with.
        seed: of weights and batches.
        source: where the sizes are from.
    """

    model: GPTConfig
    experts: int
    ranks: int
    tensor: int
    expert: int
    batch: int
    micro_batch: int
    steps: int
    lr: float
    dtype: str
    tile_size: int
    k: int = 1
    validate_every: int = 20
    validation_batches: int = 4
    seed: int = 1
    source: str = ""

    @property
    def degrees(self) -> Degrees:
        """How TED splits the model."""
        return Degrees(self.tensor, self.expert, self.ranks // (self.tensor * self.expert))

    @property
    def base(self) -> Transformer:
        """The base model as the memory model takes it."""
        return Transformer(self.model.layers, self.model.hidden, self.model.vocabulary, self.model.context)

    def ds_config(self, side: str) -> dict[str, Any]:
        """ds_config.json with these settings put in; for DeepSpeed-MoE without the block."""
        config = json.loads(files("axonn_recipes.ted_moe").joinpath("ds_config.json").read_text())
        config |= {"train_batch_size": self.batch, "train_micro_batch_size_per_gpu": self.micro_batch}
        config["bf16"]["enabled"] = self.dtype == "bf16"
        config["optimizer"]["params"]["lr"] = self.lr
        if side == "deepspeed":
            del config["axonn"]
        else:
            config["axonn"]["ted"] |= {"tensor": self.tensor, "tile_size": self.tile_size}
        return config

    def of_side(self, side: str, stock_ranks: int | None) -> Settings:
        """A side's own: DeepSpeed-MoE may have another number of ranks.

        Raises:
            ConfigError: which does not fit.
        """
        if side == "ted" or stock_ranks is None:
            return self
        if stock_ranks < 1:
            raise ConfigError(f"--stock-ranks {stock_ranks} is not at least 1; give a positive number")
        stock = replace(self, ranks=stock_ranks, tensor=1, expert=math.gcd(self.experts, stock_ranks))
        stock.check()
        return stock

    def lr_at(self, step: int) -> float:
        """Learning rate of a step, the first being 1: linear warm-up over a tenth of the run, then a cosine to a tenth."""
        warm = max(self.steps // 10, 1)
        if step <= warm:
            return self.lr * step / warm
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(self.steps - warm, 1))))

    def check(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ConfigError: the first mistake.
        """
        for name, value in {**asdict(self.model), **asdict(self)}.items():
            if isinstance(value, int) and not isinstance(value, bool) and name != "seed" and value < 1:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} {value} is not at least 1; give a positive number")
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"--lr {self.lr} is not positive; give a learning rate such as 1e-3")
        model = self.model
        if model.layers < 2:
            raise ConfigError(f"--layers {model.layers} leaves no second block to hold experts; use 2 or more")
        for name, value, whole, of in (
            ("heads", model.heads, model.hidden, f"--hidden {model.hidden}"),
            ("tensor", self.tensor, model.heads, f"--heads {model.heads}"),
        ):
            if whole % value:
                raise ConfigError(f"--{name} {value} does not divide {of}; use a divisor")
        if self.k > self.experts:
            raise ConfigError(f"--k {self.k} is more than --experts {self.experts}; use at most as many")
        if self.ranks % (self.tensor * self.expert):
            raise ConfigError(
                f"--ranks {self.ranks} is no multiple of tensor x expert = {self.tensor} x {self.expert} (equation 7.1); "
                f"use one of {self.tensor * self.expert}"
            )
        try:
            memory.require_divides(self.base, self.experts, self.degrees)
        except ValueError as error:
            raise ConfigError(f"--{error}") from None
        if self.batch % (self.micro_batch * self.ranks):
            raise ConfigError(
                f"--batch {self.batch} does not divide into microbatches of {self.micro_batch} for {self.ranks} ranks; use a "
                f"multiple of {self.micro_batch * self.ranks}"
            )


def scales() -> dict[str, dict[str, Any]]:
    """The scales of scales.json by name."""
    return json.loads(files("axonn_recipes.ted_moe").joinpath("scales.json").read_text())


_HELP = {
    "experts": "in every second block",
    "k": "experts a token",
    "ranks": "processes of either side",
    "tensor": "TED's tensor degree; DeepSpeed-MoE's is 1",
    "expert": "ranks that share the experts of a block",
    "batch": "windows a step, over all ranks",
    "micro_batch": "windows of a data-parallel rank at a time",
    "steps": "optimizer steps",
    "lr": "highest learning rate",
    "tile_size": "elements that TED's optimizer updates at a time",
    "validate_every": "steps between validations",
    "validation_batches": "batches to validate with",
    "seed": "of weights and batches",
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="axonn train ted_moe",
        description="A GPT with experts under TED and under stock DeepSpeed-MoE, side by side.",
    )
    laptop = resolved(scales()["laptop"])
    made.add_argument("--scale", choices=scales(), default="laptop", help="sizes to begin with (default laptop)")
    for name in SIZES:
        made.add_argument(f"--{name}", type=int, help=f"of the base model (default {getattr(laptop.model, name)})")
    for name, text in _HELP.items():
        value = getattr(laptop, name)
        made.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=f"{text} (default {value:g})")
    made.add_argument("--dtype", choices=DTYPES, help=f"that the model computes with (default {laptop.dtype})")
    made.add_argument(
        "--data",
        help="a text file or folder, or a folder with train.bin and val.bin of 16-bit token ids (default: the source of Python's "
        "standard library)",
    )
    made.add_argument(
        "--stock-ranks",
        type=int,
        help="processes of DeepSpeed-MoE alone (default: --ranks); with --ranks / --tensor of them gradients are summed in TED's order",
    )
    made.add_argument("--side", choices=("both", *SIDES), default="both", help="(default both)")
    add_run(made, "ted_moe", "say what would be run and what it needs, and stop")
    return made


def resolved(scale: dict[str, Any]) -> Settings:
    """A scale's settings."""
    return Settings(**{**scale, "model": GPTConfig(**scale["model"])})


def resolve(options: argparse.Namespace) -> Settings:
    """The run that the command line asks for; experts without `--expert` have as many ranks as they can.

    Raises:
        ConfigError: the first mistake.
    """
    base = resolved(scales()[options.scale])
    said = {name: value for name, value in vars(options).items() if value is not None}
    given = {field.name: said[field.name] for field in fields(Settings) if field.name in said}
    sizes = {name: said[name] for name in SIZES if name in said}
    settings = replace(base, **given, model=replace(base.model, **sizes))
    if "expert" not in given and given.keys() & {"experts", "ranks", "tensor"}:
        left = max(settings.ranks // max(settings.tensor, 1), 1)
        settings = replace(settings, expert=math.gcd(settings.experts, left))
    settings.check()
    return settings
