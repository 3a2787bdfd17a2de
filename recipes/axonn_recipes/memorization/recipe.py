"""``axonn train memorization``: what models of several sizes learn by heart, with the standard and the goldfish loss (002, Figures 10, 11)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from axonn_plugins.cluster.launch import launch
from axonn_plugins.config import ConfigError
from axonn_plugins.observe.files import put
from axonn_recipes.bench_tp.settings import under_torchrun
from axonn_recipes.memorization import report
from axonn_recipes.memorization.models import Checkpoint, Model, Small
from axonn_recipes.memorization.pages import Pages, documents, windows
from axonn_recipes.memorization.plan import described
from axonn_recipes.memorization.settings import LOSSES, Options, Settings, asked, numbers, resolve
from axonn_recipes.memorization.train import train
from axonn_recipes.pruned.plan import DTYPES


def main(arguments: Sequence[str]) -> int:
    """Train and report as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    options = asked(arguments)
    settings, seeds = resolve(options), numbers("--seeds", options.seeds)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        print(described(options, settings), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    models, pages = _read(options, settings)
    whose = None if options.checkpoint is None else str(options.checkpoint.resolve())
    folder = _folder(options, {"settings": _plain(settings), "pages": pages.digest, "checkpoint": whose})
    if first:
        print(f"{pages.source}: {len(pages.learned):,} pages, {len(pages.held_out)} held out\n", flush=True)
    cells: report.Cells = {}
    for model in models:
        for loss in LOSSES:
            cells[model.name, loss] = [_cell(model, pages, settings, loss, seed, folder) for seed in seeds]
    if first:
        report.write(cells, settings, seeds, folder)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _read(options: Options, settings: Settings) -> tuple[list[Model], Pages]:
    """The models, from the smallest to the largest, and the pages.

    Raises:
        ConfigError: what a scale needs is missing, or cannot be read.
    """
    if options.scale == "laptop":
        if options.checkpoint is not None:
            raise ConfigError("--checkpoint is not of the laptop's scale; give the --scale of its model, too")
        widths = sorted(numbers("--hidden", options.hidden))
        return [Small(hidden, settings.tokens) for hidden in widths], windows(options.data, settings)
    if options.checkpoint is None or options.data is None:
        raise ConfigError(
            f"--scale {options.scale} goes on with a checkpoint on pages; give its folder as --checkpoint and theirs as --data, or --dry-run"
        )
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
        model = Checkpoint(options.checkpoint, DTYPES[settings.dtype])
        model.build()
    except ModuleNotFoundError as missing:
        raise ConfigError(f"--checkpoint needs {missing.name}, which is not installed; pip install it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--checkpoint {options.checkpoint} cannot be read: {str(error).splitlines()[0]}") from None
    return [model], documents(options.data, tokenizer, settings)


def _plain(settings: Settings) -> dict[str, Any]:
    """The settings as JSON holds them."""
    return json.loads(json.dumps(asdict(settings)))


def _folder(options: Options, run: dict[str, Any]) -> Path:
    """The run's folder, in which run.json says what its numbers are of: a new one, or that of the same settings and text.

    Raises:
        ConfigError: the named one has another run.
    """
    number = 1
    while True:
        folder = options.runs / (options.name or ("memorization" if number == 1 else f"memorization-{number}"))
        note = folder / "run.json"
        if not note.exists() and not (folder / "results.json").exists():
            (folder / "cells").mkdir(parents=True, exist_ok=True)
            _put(note, run)
        if note.exists() and json.loads(note.read_text()) == run:
            return folder
        if options.name is not None:
            raise ConfigError(
                f"{folder} exists, and holds no run of these settings and this text; choose another --name"
            )
        number += 1


def _put(file: Path, content: Any) -> None:
    put(file, json.dumps(content, indent=1) + "\n")


def _cell(model: Model, pages: Pages, settings: Settings, loss: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run `train`, or take its results from the run's folder."""
    file = folder / "cells" / f"{model.name}-{loss}-seed-{seed}.json"
    if file.is_file():
        return json.loads(file.read_text())
    arguments = (model, pages, settings, loss, seed)
    found = train(*arguments) if under_torchrun() else launch(train, settings.shape.world, *arguments)[0]
    if os.environ.get("RANK", "0") == "0":
        _put(file, found)
        exact = ", ".join(f"{name} {share:.2f}" for name, share in found["exact"].items())
        print(f"{model.name}, {loss} loss, seed {seed}: exact match {exact}  ({found['seconds']:.0f} s)", flush=True)
    return found
