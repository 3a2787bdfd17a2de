"""Settings of a run of the validation, read from the command line and checked before anything is started."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from axonn_plugins.cli.options import check_folder
from axonn_plugins.config import ConfigError
from axonn_recipes.options import at_least_one, grid_of
from axonn_tp import Grid
from axonn_tp import Options as Switches

# What people call a model, and the unit of its loss.
MODELS = {"gpt": ("GPT", "nats a byte"), "unet": ("U-Net", "mean squared error")}
# Largest difference of any step's loss, in the loss's own unit, that rounding explains in a run of a few hundred steps.
BOUNDS = {"float64": 1e-6, "float32": 5e-3}
# Training multiplies what rounding begins, the more the longer it goes on: how many times further than the control, a
# serial run whose first weights are one unit in the last place off, the parallel run may drift where that is more.
CONTROL = 2.0


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of a run."""

    grid: Grid
    layout: str
    size: str
    steps: int
    seed: int
    minutes: float | None = None

    @property
    def options(self) -> Switches:
        """Everything on; some gathers are kept for recomputation and some are not, so that both ways are taken."""
        return Switches(
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


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a GPT and a U-Net serially and in 3D PMM with everything on, and compare every loss.

    Attributes:
        model: one alone; by itself both, one after another.
        dtype: one alone; by itself both, one after another.
        grid: gx,gy,gz,gdata.
        layout: of activations.
        size: of models and images.
        steps: optimizer steps; the most, with --minutes.
        minutes: for all curves that are asked for: each model and precision gets an equal part, and as many steps as fit into it by what a
            few steps take first.
        seed: of weights and batches.
        dry_run: say what would be run, and stop.
        out: folder for results.json and losses.png; what it holds of the same run is completed.
    """

    model: Literal["gpt", "unet"] | None = None
    dtype: Literal["float64", "float32"] | None = None
    grid: str = "2,2,2,2"
    layout: Literal["scattered", "replicated"] = "scattered"
    size: Literal["small", "large"] = "small"
    steps: int = 300
    minutes: float | None = None
    seed: int = 1
    dry_run: bool = False
    out: Path = Path("runs/validation")


def resolve(options: Options) -> Settings:
    """The run that the command line asks for.

    Raises:
        ConfigError: the first mistake.
    """
    at_least_one(options, "steps")
    if options.minutes is not None and not 0 < options.minutes < math.inf:
        raise ConfigError(f"--minutes {options.minutes:g} is not positive; give a time such as 30")
    check_folder("--out", options.out)
    return Settings(grid_of(options.grid), options.layout, options.size, options.steps, options.seed, options.minutes)
