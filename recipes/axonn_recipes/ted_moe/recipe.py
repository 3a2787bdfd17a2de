"""``axonn train ted_moe``: a GPT with experts under TED and under stock DeepSpeed-MoE (000, Figure 7.7)."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from deepspeed.accelerator import get_accelerator

from axonn_plugins.cluster.launch import launch
from axonn_plugins.config import ConfigError
from axonn_recipes.bench.output import publish
from axonn_recipes.runs import new_folder
from axonn_recipes.samo_gpt.problem import read
from axonn_recipes.ted_moe import report
from axonn_recipes.ted_moe.settings import SIDES, asked, resolve
from axonn_recipes.ted_moe.sides import train


def main(arguments: Sequence[str]) -> int:
    """Train both sides as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    options = asked(arguments)
    settings = resolve(options)
    folder = new_folder(options.runs, options.name, "ted_moe")
    print(report.described(settings), end="\n\n", flush=True)
    if options.dry_run:
        print(report.needed(settings), end="\n\n")
        print(json.dumps(settings.ds_config("ted"), indent=2))
        return 0
    corpus = read(options.data, settings.model)
    _check_devices(settings.ranks)
    sides = SIDES if options.side == "both" else (options.side,)
    own = {side: settings.of_side(side, options.stock_ranks) for side in sides}
    outcomes = {side: launch(train, own[side].ranks, side, own[side], corpus, folder / side)[0] for side in sides}
    numbers = report.results(settings, outcomes)
    print()
    publish(folder, numbers, report.text(numbers), report.pictures(numbers))
    return 0


def _check_devices(ranks: int) -> None:
    if get_accelerator().device_name() == "cuda" and torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"--ranks {ranks} is more than the {torch.cuda.device_count()} GPUs here; lower it, --tensor and --expert, or set "
            "DS_ACCELERATOR=cpu"
        )
