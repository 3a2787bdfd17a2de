"""Settings of a run of the quickstart: their defaults, and the DeepSpeed configuration that they resolve to."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro import conf

from axonn_plugins.cli.options import read
from axonn_plugins.config import ConfigError
from axonn_plugins.observe.files import put
from axonn_recipes.models.gpt import GPTConfig
from axonn_recipes.options import Run, at_least_one, heads_fit, part, rates_and_seed

# What a run that goes on may change: checkpoints know no grid.
_WHERE = ("ranks", "gx", "gy", "gz")


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of a run; stored beside it, so that --resume goes on with the same.

    Attributes:
        ranks: processes to start.
        steps: optimizer steps.
        batch: windows a step, over all ranks.
        context: bytes a window.
        layers: transformer blocks.
        heads: attention heads.
        hidden: features of the residual stream.
        tied: output head and token embedding share weights.
        precision: that the model computes with.
        lr: highest learning rate.
        seed: of weights and batches.
        gx: ranks along x.
        gy: ranks along y.
        gz: ranks along z; the data axis is ranks/(gx*gy*gz).
        data: a text file or folder; by itself the source of Python's standard library.
        serial: train the same in one process, in plain PyTorch.
    """

    ranks: int = 4
    steps: int = 280
    batch: int = 16
    context: int = 64
    layers: int = 4
    heads: int = 8
    hidden: int = 256
    tied: bool = False
    precision: Literal["bf16", "fp32", "fp64"] = "bf16"
    lr: float = 1e-3
    seed: int = 1
    gx: int = 2
    gy: int = 1
    gz: int = 2
    data: str | None = None
    serial: bool = False

    @property
    def model(self) -> GPTConfig:
        """Sizes of the model."""
        return GPTConfig(256, self.context, self.layers, self.heads, self.hidden, self.tied)

    def check(self) -> None:
        """Refuse sizes that make no model.

        Raises:
            ConfigError: the first.
        """
        at_least_one(self, "ranks", "steps", "batch", "context", "layers", "heads", "hidden", "gx", "gy", "gz")
        rates_and_seed(self, "lr")
        heads_fit(self.hidden, self.heads)

    def ds_config(self) -> dict[str, Any]:
        """The recipe's ds_config.json with these settings put in."""
        config = json.loads(files("axonn_recipes.quickstart").joinpath("ds_config.json").read_text())
        config["train_batch_size"] = self.batch
        config["bf16"]["enabled"] = self.precision == "bf16"
        config["optimizer"]["params"]["lr"] = self.lr
        if self.precision == "fp64":
            # DeepSpeed's ZeRO keeps float32 masters.
            config["zero_optimization"]["stage"] = 0
        block = config["axonn"]["tensor_parallel"]
        block.update(gx=self.gx, gy=self.gy, gz=self.gz)
        block["plan"]["blocks.*.attention.qkv"]["heads"] = self.heads
        return config

    def lr_at(self, step: int) -> float:
        """Learning rate of a step, the first being 1: linear warm-up over a tenth of the run, then a cosine to a tenth."""
        warm = max(self.steps // 10, 1)
        if step <= warm:
            return self.lr * step / warm
        progress = (step - warm) / max(self.steps - warm, 1)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True, kw_only=True)
class Options(Settings, Run):
    """A byte-level GPT in 3D PMM under DeepSpeed, on four ranks of one machine.

    Attributes:
        compare: train serially and in parallel and compare the losses.
        resume: go on from the last complete checkpoint of the newest run.
        save_every: steps between checkpoints.
        trace_steps: record these steps of rank 0, the first and the last, as a Chrome trace, trace-rank0.json.
        keep_last: complete checkpoints that stay.
    """

    compare: Annotated[bool, conf.arg(name="check")] = False
    resume: bool = False
    save_every: int = 100
    trace_steps: tuple[int, int] | None = None
    keep_last: int = 2


def asked(arguments: Sequence[str], stored: Settings | None = None) -> Options:
    """The options of a command line; what it does not give is as in a stored run.

    Raises:
        ConfigError: a mistake of the user's.
    """
    return read(Options, arguments, "axonn train quickstart", None if stored is None else Options(**asdict(stored)))


def resolve(options: Options, stored: Settings | None = None) -> Settings:
    """The settings that are asked for.

    Raises:
        ConfigError: they contradict the stored run, or make no model.
    """
    settings = Settings(**part(Settings, options))
    for field in fields(Settings) if stored is not None else ():
        value, had = getattr(settings, field.name), getattr(stored, field.name)
        if field.name not in _WHERE and value != had:
            raise ConfigError(
                f"--{field.name} {value} contradicts the run to resume, which has {had}; leave it out, "
                "or start a new run without --resume"
            )
    settings.check()
    return settings


def find_run(runs: Path, name: str | None, resume: bool) -> Path:
    """The folder of this run: a new one, or with `resume` the newest (or the named) that has a checkpoint.

    Raises:
        ConfigError: nothing to resume, or a named new run exists.
    """
    if resume:
        candidates = [runs / name] if name else sorted(runs.glob("quickstart*"), key=lambda p: p.stat().st_mtime)
        complete = [run for run in candidates if (run / "run.json").is_file()]
        if not complete:
            raise ConfigError(f"--resume finds no run {name or 'quickstart'} in {runs}; start one without --resume")
        return complete[-1]
    if name:
        if (runs / name).exists():
            raise ConfigError(f"{runs / name} exists; choose another --name, or go on with it with --resume")
        return runs / name
    number = 1
    while (runs / (run := "quickstart" if number == 1 else f"quickstart-{number}")).exists():
        number += 1
    return runs / run


def store(settings: Settings, digest: str, run: Path) -> None:
    """Write run.json."""
    run.mkdir(parents=True, exist_ok=True)
    put(run / "run.json", json.dumps({"settings": asdict(settings), "corpus": digest}, indent=2) + "\n")


def stored_settings(run: Path) -> tuple[Settings, str]:
    """Settings and corpus digest of a run.

    Raises:
        ConfigError: its file is not one that `store` wrote.
    """
    file = run / "run.json"
    try:
        content = json.loads(file.read_text())
        return Settings(**content["settings"]), content["corpus"]
    except (ValueError, TypeError, KeyError):
        raise ConfigError(
            f"{file} holds no settings that this version knows; start a new run without --resume"
        ) from None
