"""Settings of a run of ``axonn bench pccl --train``, read from the command line and checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from axonn_plugins.cluster.units import bits_per_second, nanoseconds
from axonn_recipes.bench_pccl.settings import Network, Places, Tuned, layouts, where
from axonn_recipes.bench_tp.settings import under_torchrun
from axonn_recipes.models.gpt import GPTConfig
from axonn_recipes.options import at_least_one, heads_fit

SIDES = ("gloo", "pccl")
WARM_UP = 2  # steps of a turn before the timed ones; in the first ZeRO-3 learns what to prefetch
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}  # of losses, in nats: what rounding explains, and no mistake


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A GPT, and how often it is trained.

    Attributes:
        layers: transformer blocks.
        hidden: features of the residual stream.
        heads: attention heads.
        context: tokens a sequence.
        batch: sequences a step and rank.
        steps: timed steps of a turn, which begins with a new engine.
        rounds: turns of each side.
        precision: of the model.
    """

    layers: int = 6
    hidden: int = 384
    heads: int = 6
    context: int = 64
    batch: int = 1
    steps: int = 4
    rounds: int = 3
    precision: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True, kw_only=True)
class Options(Sizes, Tuned):
    """DeepSpeed ZeRO-3 with gloo's collectives and with PCCL's, on the CPU: one script, with the block and without.

    Attributes:
        layouts: nodes x ranks a node, such as 4x2,8x4; 1x4 is one node.
    """

    layouts: str = "8x2"


@dataclass(frozen=True, kw_only=True)
class Training(Sizes, Places):
    """Everything that decides what is trained, and how often.

    Attributes:
        tune: whether PCCL is tuned first, or goes by its rules of thumb.
    """

    tune: bool
    seed: int = 1

    @property
    def model(self) -> GPTConfig:
        """Sizes of the model."""
        return GPTConfig(256, self.context, self.layers, self.heads, self.hidden)

    @property
    def tokens(self) -> int:
        """Tokens a step and rank."""
        return self.batch * self.context

    def ds_config(self, side: str) -> dict[str, Any]:
        """The ds_config.json of a side: stock, with nothing but the block between them."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.batch,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": 3},
        }
        if self.precision == "bf16":
            config["bf16"] = {"enabled": True}
        return config | ({"axonn": {"pccl": {}}} if side == "pccl" else {})


def resolve(options: Options) -> Training:
    """The run that the command line asks for.

    Raises:
        ConfigError: the first mistake.
    """
    at_least_one(options, *(field.name for field in fields(Sizes) if field.name != "precision"))
    heads_fit(options.hidden, options.heads)
    nanoseconds(options.latency), bits_per_second(options.bandwidth)
    shared = {field.name: getattr(options, field.name) for field in (*fields(Sizes), *fields(Network))}
    return Training(layouts=layouts(options.layouts), emulated=not under_torchrun(), tune=options.tune, **shared)


def described(settings: Training) -> str:
    """The run in words."""
    lines = [
        where(settings),
        f"GPT: {settings.layers} blocks, hidden {settings.hidden}, {settings.heads} heads, "
        f"{settings.batch} x {settings.context} tokens a rank and step, {settings.precision}, AdamW",
        "DeepSpeed ZeRO-3 with its own defaults, on the CPU; sides: gloo, and pccl "
        f"({'tuned' if settings.tune else 'rules of thumb, or what was measured before'})",
        f"{settings.rounds} turns of each side, of {WARM_UP} steps to warm up and {settings.steps} timed ones",
    ]
    return "\n".join(lines)
