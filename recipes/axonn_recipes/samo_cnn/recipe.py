"""``axonn train samo_cnn``: VGG-19 or WideResnet-101 dense and pruned with SAMO, in plain PyTorch (000, Table 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from axonn_recipes.pruned import report
from axonn_recipes.pruned.compare import compare
from axonn_recipes.runs import new_folder
from axonn_recipes.samo_cnn.images import read
from axonn_recipes.samo_cnn.problem import Classes, make
from axonn_recipes.samo_cnn.settings import Settings, asked, resolve


def main(arguments: Sequence[str]) -> int:
    """Train both sides as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    options = asked(arguments)
    settings = resolve(options)
    folder = new_folder(options.runs, options.name, "samo_cnn")
    if options.dry_run:
        print(_described(settings))
        return 0
    images = read(options.data)
    config = replace(settings.config, classes=images.classes, channels=images.training.shape[1])
    settings = replace(settings, config=config)
    print(_described(settings))
    print(
        f"{images.source}: {len(images.training):,} images to learn from, {len(images.validation):,} held out\n",
        flush=True,
    )
    plan = settings.plan
    problem = Classes(images, config, settings.name, settings.batch, plan.seed)
    return compare(problem, plan, options.side, folder)


def _described(settings: Settings) -> str:
    title = f"{settings.name}, {settings.batch} images a step"
    return report.described(settings.plan, title, lambda: make(settings.config))
