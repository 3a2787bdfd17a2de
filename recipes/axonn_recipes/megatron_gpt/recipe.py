"""``axonn train megatron_gpt``: a byte-level GPT on megatron.core alone, its layers split by Megatron or in 3D PMM."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from axonn_plugins.cli.options import check_folder, read
from axonn_plugins.cluster.launch import launch
from axonn_plugins.config import ConfigError
from axonn_recipes.bench.rounds import apart
from axonn_recipes.data import Corpus, load
from axonn_recipes.megatron_gpt.settings import VOCABULARY, Options, Settings, resolve
from axonn_recipes.runs import new_folder

if TYPE_CHECKING:
    from axonn_recipes.megatron_gpt.train import Outcome

TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}
"""Largest relative difference of a loss or norm that is rounding: in fp32 what the issue of Megatron's scripts asks for."""
_WARMUP = 2


def main(arguments: Sequence[str]) -> int:
    """Train as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    # Megatron says at each import, and often again, what it lacks for speed.
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    options = read(Options, arguments, "axonn train megatron_gpt")
    settings = resolve(options)
    if options.load is not None and not (options.load / "metadata.json").is_file():
        raise ConfigError(f"--load {options.load} holds no checkpoint; give a folder that --save wrote")
    for option, folder in (("--save", options.save), ("--prepare", options.prepare and options.prepare.parent)):
        if folder is not None:
            check_folder(option, folder)
    if options.save is not None and options.save.exists() and any(options.save.iterdir()):
        raise ConfigError(f"--save {options.save} is not empty; choose another folder")
    print(described(settings), flush=True)
    if options.dry_run:
        return 0
    corpus = load(options.text, settings.context)
    if options.prepare is not None:
        print(*_prepare(corpus, options.prepare), sep="\n")
        return 0
    _check_devices(settings)
    folder = new_folder(options.runs, options.name, "megatron_gpt")
    prefix = folder / "text"
    _prepare(corpus, prefix)
    outcome = _train(settings, prefix, folder, options.load, options.save)
    seconds = statistics.median(outcome.seconds[_WARMUP:] or outcome.seconds)
    print(
        f"\nloss {outcome.losses[-1]:.4f} after step {outcome.first + settings.steps - 1}, {seconds * 1e3:.0f} ms a step"
    )
    print(f"  {folder / 'metrics.jsonl'}")
    return _check(settings, outcome, prefix, options.load) if options.compare else 0


def described(settings: Settings) -> str:
    """The run in words."""
    grid = settings.grid
    split = f"Megatron's own layers, tensor {settings.tensor}"
    if grid is not None:
        split = f"3D PMM, gx {grid.gx} gy {grid.gy} gz {grid.gz} data {settings.data // grid.gz}"
    return (
        f"GPT of {settings.layers} layers, hidden {settings.hidden}, {settings.heads} heads; {settings.steps} steps of {settings.batch} x "
        f"{settings.context} bytes, {settings.precision}\n{settings.ranks} ranks: {split}, pipeline {settings.pipeline_model_parallel_size}"
    )


def _prepare(corpus: Corpus, prefix: Path) -> list[Path]:
    from axonn_recipes.megatron_gpt.text import prepare

    return prepare(corpus, prefix, VOCABULARY)


def _check_devices(settings: Settings) -> None:
    if torch.cuda.is_available() and torch.cuda.device_count() < settings.ranks:
        raise ConfigError(
            f"--ranks {settings.ranks} is more than the {torch.cuda.device_count()} GPUs here; lower it, or set CUDA_VISIBLE_DEVICES= "
            "to run on the CPU"
        )


def _train(settings: Settings, prefix: Path, folder: Path | None, load: Path | None, save: Path | None) -> Outcome:
    return launch(_rank, settings.ranks, settings, prefix, folder, load, save)[0]


def _rank(*arguments: Any) -> Outcome:
    from axonn_recipes.megatron_gpt.train import train

    outcome = train(*arguments)
    dist.destroy_process_group()
    return outcome


def _check(settings: Settings, outcome: Outcome, prefix: Path, load: Path | None) -> int:
    """Train on one rank by Megatron itself, and compare losses and norms step by step."""
    stock = _train(settings.stock(), prefix, None, load, None)
    losses = apart(stock.losses, outcome.losses, relative=True)
    norms = apart(stock.norms, outcome.norms, relative=True)
    allowed = TOLERANCES[settings.precision]
    good = losses <= allowed and norms <= allowed
    print(
        f"\nlargest relative difference from Megatron on one rank: losses {losses:.2e}, gradient norms {norms:.2e}; "
        f"{'within' if good else 'BEYOND'} the {allowed:g} that {settings.precision} rounding explains"
    )
    return 0 if good else 1
