"""Settings of a run, read from the command line and checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from axonn_plugins.config import ConfigError
from axonn_recipes.models.gpt import GPTConfig
from axonn_recipes.options import Run, at_least_one, heads_fit, part, rates_and_seed

SIDES = ("serial", "deepspeed", "message_driven")
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
        stages: G_inter: ranks of a pipeline.
        pipelines: G_data: pipelines side by side.
        batch: windows a step, over all pipelines.
        microbatch: windows that go through a pipeline together.
        steps: optimizer steps.
        lr: learning rate of AdamW.
        dtype: that the model computes with.
        offload: keep the message-driven side's optimizer state in host memory.
        bucket_size: elements of a bucket then.
        sparsity: share of the message-driven side's weights to prune, with SAMO.
        seed: of weights and windows.
    """

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    context: int = 64
    stages: int = 2
    pipelines: int = 2
    batch: int = 16
    microbatch: int = 1
    steps: int = 200
    lr: float = 1e-3
    dtype: Literal["fp32", "bf16"] = "fp32"
    offload: bool = False
    bucket_size: int = 100_000
    sparsity: float | None = None
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
        """Microbatches of one pipeline in a step."""
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


@dataclass(frozen=True, kw_only=True)
class Options(Settings, Run):
    """A GPT on one process, under DeepSpeed's pipeline and under the message-driven one, side by side.

    Attributes:
        side: one side alone; by itself all.
        data: a text file or folder; by itself the source of Python's standard library.
    """

    side: Literal["serial", "deepspeed", "message_driven"] | None = None
    data: str | None = None


def resolve(options: Options) -> Settings:
    """The run that the command line asks for.

    Raises:
        ConfigError: the first mistake.
    """
    at_least_one(options, *_NUMBERS)
    heads_fit(options.hidden, options.heads)
    rates_and_seed(options, "lr")
    if options.sparsity is not None and not 0 <= options.sparsity < 1:
        raise ConfigError(f"--sparsity {options.sparsity} is not a share from 0 to below 1; use one such as 0.9")
    settings = Settings(**part(Settings, options))
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
