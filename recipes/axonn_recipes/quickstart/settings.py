"""What a run of the quickstart is: its settings, their defaults, and the DeepSpeed configuration they resolve to."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from axonn_plugins.config import ConfigError
from axonn_recipes.models.gpt import GPTConfig
from axonn_recipes.options import at_least_one, heads_fit

PRECISIONS = ("bf16", "fp32", "fp64")


# What a run that goes on may change: checkpoints know no grid.
_WHERE = ("ranks", "gx", "gy", "gz")


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of a run; stored beside it, so that --resume goes on with the same."""

    ranks: int = 4
    steps: int = 280
    batch: int = 16
    context: int = 64
    layers: int = 4
    heads: int = 8
    hidden: int = 256
    tied: bool = False
    precision: str = "bf16"
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for each setting, and those that change nothing in the numbers."""
    defaults = Settings()
    help_text = {
        "ranks": "processes to start",
        "steps": "optimizer steps",
        "batch": "windows a step, over all ranks",
        "context": "bytes a window",
        "layers": "transformer blocks",
        "heads": "attention heads",
        "hidden": "features of the residual stream",
        "lr": "highest learning rate",
        "seed": "of weights and batches",
        "gx": "ranks along x",
        "gy": "ranks along y",
        "gz": "ranks along z; the data axis is ranks/(gx*gy*gz)",
    }
    for name, text in help_text.items():
        default = getattr(defaults, name)
        parser.add_argument(f"--{name}", type=type(default), help=f"{text} (default {default})")
    parser.add_argument("--precision", choices=PRECISIONS, help=f"(default {defaults.precision})")
    parser.add_argument(
        "--tied", action="store_true", default=None, help="output head and token embedding share weights"
    )
    parser.add_argument("--data", help="a text file or folder (default: the source of Python's standard library)")
    parser.add_argument(
        "--serial", action="store_true", default=None, help="train the same in one process, in plain PyTorch"
    )
    parser.add_argument("--check", action="store_true", help="train serially and in parallel and compare the losses")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan and the resolved configuration, and stop"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last complete checkpoint of the newest run"
    )
    parser.add_argument("--name", help="the run's folder under runs/ (default quickstart, quickstart-2, ...)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs (default runs)")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints (default 100)")
    parser.add_argument(
        "--trace-steps",
        type=int,
        nargs=2,
        metavar=("FIRST", "LAST"),
        help="record these steps of rank 0 as a Chrome trace, trace-rank0.json",
    )
    parser.add_argument("--keep-last", type=int, default=2, help="complete checkpoints that stay (default 2)")


def resolve(arguments: argparse.Namespace, stored: Settings | None = None) -> Settings:
    """Defaults, or a stored run's settings, with what the command line gives put over them.

    Raises:
        ConfigError: the command line contradicts the stored run, or the settings make no model.
    """
    base = stored or Settings()
    given = {
        f.name: getattr(arguments, f.name) for f in fields(Settings) if getattr(arguments, f.name, None) is not None
    }
    if stored is not None:
        for name, value in given.items():
            if name not in _WHERE and value != getattr(stored, name):
                raise ConfigError(
                    f"--{name} {value} contradicts the run to resume, which has {getattr(stored, name)}; leave it out, "
                    "or start a new run without --resume"
                )
    settings = Settings(**{**asdict(base), **given})
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
    note = run / "run.json.new"
    note.write_text(json.dumps({"settings": asdict(settings), "corpus": digest}, indent=2) + "\n")
    note.replace(run / "run.json")


def stored_settings(run: Path) -> tuple[Settings, str]:
    """Settings and corpus digest of a run."""
    content = json.loads((run / "run.json").read_text())
    return Settings(**content["settings"]), content["corpus"]
