"""Settings of a run, read from the command line and checked before anything is started."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from typing import Any, Literal

from axonn_plugins.config import ConfigError
from axonn_recipes.models.gpt import GPTConfig
from axonn_recipes.options import Run, part, rates_and_seed, read_scaled
from ted_moe import memory
from ted_moe.memory import Degrees, Transformer

SIDES = ("deepspeed", "ted")
SIZES = ("layers", "heads", "hidden", "context")


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of the training of a GPT with experts.

    Attributes:
        experts: in every second block.
        k: experts a token.
        ranks: processes of either side.
        tensor: TED's tensor degree; DeepSpeed-MoE's is 1.
        batch: windows a step, over all ranks.
        micro_batch: windows of a data-parallel rank at a time.
        steps: optimizer steps.
        lr: highest learning rate.
        dtype: that the model computes with.
        tile_size: elements that TED's optimizer updates at a time.
        validate_every: steps between validations.
        validation_batches: batches to validate with.
        seed: of weights and batches.
    """

    experts: int
    k: int = 1
    ranks: int
    tensor: int
    batch: int
    micro_batch: int
    steps: int
    lr: float
    dtype: Literal["fp32", "bf16"]
    tile_size: int
    validate_every: int = 20
    validation_batches: int = 4
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """Everything that decides the numbers of a run.

    Attributes:
        model: the base model.
        expert: ranks that share the experts of a block.
        source: where the sizes are from.
    """

    model: GPTConfig
    expert: int
    source: str = ""

    @property
    def degrees(self) -> Degrees:
        """The degrees by which TED splits the model."""
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
        rates_and_seed(self, "lr")
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


@dataclass(frozen=True, kw_only=True)
class Options(Training, Run):
    """A GPT with experts under TED and under stock DeepSpeed-MoE, side by side.

    Attributes:
        scale: sizes to begin with.
        layers: transformer blocks of the base model.
        heads: attention heads.
        hidden: features of the residual stream.
        context: tokens a window.
        expert: ranks that share the experts of a block; by itself as many as can.
        data: a text file or folder, or a folder with train.bin and val.bin of 16-bit token ids; by itself the source of
            Python's standard library.
        stock_ranks: processes of DeepSpeed-MoE alone, by itself --ranks; with --ranks / --tensor of them gradients are summed
            in TED's order.
        side: one alone, or both.
    """

    scale: Literal["laptop", "figure_7_7", "figure_7_5", "gpt3_xl", "gpt3_2.7b", "gpt3_6.7b", "gpt3_13b"] = "laptop"
    layers: int
    heads: int
    hidden: int
    context: int
    expert: int | None = None
    data: str | None = None
    stock_ranks: int | None = None
    side: Literal["both", "deepspeed", "ted"] = "both"


def asked(arguments: Sequence[str]) -> Options:
    """The options of a command line.

    Raises:
        ConfigError: a mistake of the user's.
    """
    return read_scaled(Options, arguments, "axonn train ted_moe", _of)


def _of(name: str) -> Options:
    scale = scales()[name]
    sizes = {key: scale["model"][key] for key in SIZES}
    training = {field.name: scale[field.name] for field in fields(Training) if field.name in scale}
    return Options(scale=name, **sizes, **training)  # type: ignore[arg-type]


def resolve(options: Options) -> Settings:
    """The run that the options ask for.

    Raises:
        ConfigError: the first mistake.
    """
    scale = scales()[options.scale]
    model = replace(GPTConfig(**scale["model"]), **{name: getattr(options, name) for name in SIZES})
    most = math.gcd(options.experts, max(options.ranks // max(options.tensor, 1), 1))
    settings = Settings(
        model=model,
        expert=most if options.expert is None else options.expert,
        source=scale["source"],
        **part(Training, options),
    )
    settings.check()
    return settings
