"""What a run of the validation is, read from the command line and checked before anything is started."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from axonn_plugins.config import ConfigError
from axonn_recipes.options import at_least_one
from axonn_tp import Grid, Options
from axonn_tp.options import LAYOUTS

# What people call a model, and the unit of its loss.
MODELS = {"gpt": ("GPT", "nats a byte"), "unet": ("U-Net", "mean squared error")}
# Largest difference of any step's loss, in the loss's own unit, that rounding explains.
BOUNDS = {"float64": 1e-6, "float32": 5e-3}


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of a run."""

    grid: Grid
    layout: str
    steps: int
    seed: int

    @property
    def options(self) -> Options:
        """Everything on; some gathers are kept for recomputation and some are not, so that both ways are taken."""
        return Options(
            layout=self.layout,
            overlap_all_reduce=True,
            overlap_reduce_scatter=True,
            overlap_all_gather=True,
            reshard_after_forward=True,
            cache_gathers=6,
            tune_matmuls=True,
        )

    @property
    def device(self) -> str:
        """Where to train: on GPUs where there is one for each rank."""
        return "cuda" if torch.cuda.device_count() >= self.grid.world else "cpu"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="axonn train validation",
        description="Train a GPT and a U-Net serially and in 3D PMM with everything on, and compare every loss.",
    )
    made.add_argument("--model", choices=MODELS, help="(default both, one after another)")
    made.add_argument("--dtype", choices=BOUNDS, help="(default both, one after another)")
    made.add_argument("--grid", default="2,2,2,2", help="gx,gy,gz,gdata (default 2,2,2,2)")
    made.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help=f"of activations (default {LAYOUTS[0]})")
    made.add_argument("--steps", type=int, default=300, help="optimizer steps (default 300)")
    made.add_argument("--seed", type=int, default=1, help="of weights and batches (default 1)")
    made.add_argument("--dry-run", action="store_true", help="say what would be run, and stop")
    made.add_argument(
        "--out",
        type=Path,
        default=Path("runs/validation"),
        help="folder for results.json and losses.png; what it holds of the same run is completed (default runs/validation)",
    )
    return made


def resolve(options: argparse.Namespace) -> Settings:
    """The run that the command line asks for.

    Raises:
        ConfigError: the first mistake.
    """
    at_least_one(options, "steps")
    return Settings(_grid(options.grid), options.layout, options.steps, options.seed)


def _grid(text: str) -> Grid:
    try:
        gx, gy, gz, gdata = (int(size) for size in text.split(","))
    except ValueError:
        raise ConfigError(f"--grid {text} is not four integers; write gx,gy,gz,gdata as in 2,2,2,2") from None
    try:
        return Grid(gx, gy, gz, gdata)
    except ValueError as error:
        raise ConfigError(f"--grid {text}: {error}") from None
