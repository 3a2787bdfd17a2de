"""What a run of ``axonn bench pccl --train`` is, read from the command line and checked before anything is started."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from axonn_plugins.cluster.units import bits_per_second, nanoseconds
from axonn_recipes.bench_pccl.settings import Places, add_places, add_tuned_run, layouts, where
from axonn_recipes.bench_tp.settings import under_torchrun
from axonn_recipes.models.gpt import GPTConfig
from axonn_recipes.options import add_numbers, at_least_one, heads_fit

SIDES = ("gloo", "pccl")
WARM_UP = 2  # steps of a turn before the timed ones; in the first ZeRO-3 learns what to prefetch
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}  # of losses, in nats: what rounding explains, and no mistake
_SIZES = (
    ("layers", 6, "transformer blocks"),
    ("hidden", 384, "features of the residual stream"),
    ("heads", 6, "attention heads"),
    ("context", 64, "tokens a sequence"),
    ("batch", 1, "sequences a step and rank"),
    ("steps", 4, "timed steps of a turn"),
    ("rounds", 3, "turns of each side"),
)


@dataclass(frozen=True)
class Training(Places):
    """Everything that decides what is trained, and how often.

    Attributes:
        layers, hidden, heads, context: sizes of the GPT.
        batch: sequences a step and rank.
        steps: timed ones of a turn, which begins with a new engine.
        rounds: turns of each side.
        precision: "fp32" or "bf16".
        tune: whether PCCL is tuned first, or goes by its rules of thumb.
    """

    layers: int
    hidden: int
    heads: int
    context: int
    batch: int
    steps: int
    rounds: int
    precision: str
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


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="axonn bench pccl --train",
        description="DeepSpeed ZeRO-3 with gloo's collectives and with PCCL's, on the CPU: one script, with the block and without.",
    )
    add_places(made, "8x2")
    add_numbers(made, _SIZES)
    made.add_argument("--precision", choices=TOLERANCE, default="fp32", help="(default %(default)s)")
    add_tuned_run(made, "bench_pccl_train")
    return made


def resolve(options: argparse.Namespace) -> Training:
    """The run that the command line asks for.

    Raises:
        ConfigError: the first mistake.
    """
    at_least_one(options, *(name for name, *_ in _SIZES))
    heads_fit(options.hidden, options.heads)
    nanoseconds(options.latency), bits_per_second(options.bandwidth)
    return Training(
        *(layouts(options.layouts), not under_torchrun(), options.latency, options.bandwidth),
        *(options.layers, options.hidden, options.heads, options.context, options.batch, options.steps, options.rounds),
        *(options.precision, options.tune),
    )


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
