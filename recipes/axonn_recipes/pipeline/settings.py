"""What a run is, read from the command line and checked before anything is started."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from axonn_plugins.config import ConfigError
from axonn_recipes.models.gpt import GPTConfig
from axonn_recipes.options import add_numbers, add_run, at_least_one, heads_fit

SIDES = ("serial", "deepspeed", "message_driven")
DTYPES = ("fp32", "bf16")
WEIGHT_DECAY = 0.01
_NUMBERS = (
    "layers",
    "hidden",
    "heads",
    "context",
    "stages",
    "pipelines",
    "batch",
    "microbatch",
    "steps",
    "bucket_size",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides the numbers of a run; sizes are counts.

    Attributes:
        layers: transformer blocks.
        hidden: features of the residual stream.
        heads: attention heads.
        context: tokens a window.
        stages: G_inter.
        pipelines: G_data.
        batch: windows a step, over all pipelines.
        microbatch: windows that go through a pipeline together.
        steps: optimizer steps.
        lr: learning rate of AdamW.
        dtype: of `DTYPES`.
        offload: whether the message-driven side keeps its optimizer's state in host memory.
        bucket_size: elements of a bucket then.
        sparsity: share of the weights that the message-driven side prunes, with SAMO; None: nothing.
        seed: of weights and windows.
    """

    layers: int
    hidden: int
    heads: int
    context: int
    stages: int
    pipelines: int
    batch: int
    microbatch: int
    steps: int
    lr: float
    dtype: str
    offload: bool
    bucket_size: int
    sparsity: float | None
    seed: int = 1

    @property
    def ranks(self) -> int:
        """G_inter·G_data."""
        return self.stages * self.pipelines

    @property
    def model(self) -> GPTConfig:
        """Sizes of the model."""
        return GPTConfig(256, self.context, self.layers, self.heads, self.hidden)

    @property
    def microbatches(self) -> int:
        """Of one pipeline in a step."""
        return self.batch // (self.microbatch * self.pipelines)

    def ds_config(self, side: str) -> dict[str, Any]:
        """ds_config.json of a side under DeepSpeed."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.microbatch,
            "gradient_accumulation_steps": self.microbatches,
            "optimizer": {"type": "AdamW", "params": {"lr": self.lr, "weight_decay": WEIGHT_DECAY, "torch_adam": True}},
            "bf16": {"enabled": self.dtype == "bf16"},
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
        }
        if side == "message_driven":
            config["axonn"] = {"pipeline": {"schedule": "message_driven"}}
            if self.offload:
                config["axonn"]["offload_optimizer"] = {"bucket_size": self.bucket_size}
            if self.sparsity is not None:
                config["axonn"]["samo"] = {"sparsity": self.sparsity}
        return config


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="axonn train pipeline",
        description="A GPT on one process, under DeepSpeed's pipeline and under the message-driven one, side by side.",
    )
    defaults = (4, 64, 4, 64, 2, 2, 16, 1, 200, 100_000)
    texts = {
        "layers": "transformer blocks",
        "hidden": "features of the residual stream",
        "heads": "attention heads",
        "context": "tokens a window",
        "stages": "G_inter: ranks of a pipeline",
        "pipelines": "G_data: pipelines side by side",
        "batch": "windows a step, over all pipelines",
        "microbatch": "windows that go through a pipeline together",
        "steps": "optimizer steps",
        "bucket_size": "elements of a bucket with --offload",
    }
    rows = zip(_NUMBERS, defaults, strict=True)
    add_numbers(made, ((name.replace("_", "-"), default, texts[name]) for name, default in rows))
    made.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW (default 1e-3)")
    made.add_argument("--dtype", choices=DTYPES, default="fp32", help="that the model computes with (default fp32)")
    made.add_argument(
        "--offload", action="store_true", help="keep the message-driven side's optimizer state in host memory"
    )
    made.add_argument("--sparsity", type=float, help="share of the message-driven side's weights to prune, with SAMO")
    made.add_argument("--side", choices=SIDES, help="one side alone (default all)")
    made.add_argument("--data", help="a text file or folder (default: the source of Python's standard library)")
    add_run(made, "pipeline")
    return made


def resolve(options: argparse.Namespace) -> Settings:
    """The run that the command line asks for.

    Raises:
        ConfigError: the first mistake.
    """
    at_least_one(options, *_NUMBERS)
    heads_fit(options.hidden, options.heads)
    if not options.lr > 0:
        raise ConfigError(f"--lr {options.lr} is not positive; give a learning rate such as 1e-3")
    if options.sparsity is not None and not 0 <= options.sparsity <= 1:
        raise ConfigError(f"--sparsity {options.sparsity} is not a share; give a number from 0 to 1, such as 0.9")
    if options.sparsity is not None and options.offload:
        raise ConfigError("--offload and --sparsity do not go together; leave one of them out")
    names = [name for name in Settings.__dataclass_fields__ if name != "seed"]
    settings = Settings(**{name: getattr(options, name) for name in names})
    if settings.layers + 2 < settings.stages:
        raise ConfigError(
            f"--stages {settings.stages} are more than the {settings.layers + 2} parts of a GPT of --layers {settings.layers}; lower them"
        )
    if settings.batch % (settings.microbatch * settings.pipelines):
        raise ConfigError(
            f"--batch {settings.batch} does not divide into microbatches of {settings.microbatch} for {settings.pipelines} pipelines; use a "
            f"multiple of {settings.microbatch * settings.pipelines}"
        )
    return settings


def described(settings: Settings) -> str:
    """The run in words."""
    s = settings
    pruned = "" if s.sparsity is None else f", {s.sparsity:.0%} pruned with SAMO"
    state = f", optimizer state in host memory in buckets of {s.bucket_size:,}" if s.offload else ""
    return "\n".join(
        [
            f"GPT of {s.layers} blocks, hidden {s.hidden}, {s.heads} heads, {s.dtype}, AdamW, {s.steps} steps of {s.batch} x {s.context} tokens",
            f"G_inter {s.stages} x G_data {s.pipelines} = {s.ranks} ranks, {s.microbatches} microbatches of {s.microbatch} a pipeline",
            f"serial: one process, plain PyTorch; deepspeed: stock PipelineEngine; message_driven: axonn.pipeline{state}{pruned}",
        ]
    )
