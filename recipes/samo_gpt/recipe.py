"""``axonn train samo_gpt``: a GPT dense and pruned with SAMO, on data-parallel ranks in plain PyTorch (000, Figure 4.4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plugins.launch import launch
from recipes.models.gpt import GPT
from recipes.pruned import report
from recipes.pruned.train import train
from recipes.runs import new_folder
from recipes.samo_gpt.problem import Text, read
from recipes.samo_gpt.settings import Settings, parser, resolve
from samo.memory import layers_of


def main(arguments: Sequence[str]) -> int:
    """Train both sides as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    options = parser().parse_args(arguments)
    settings = resolve(options)
    folder = new_folder(options.runs, options.name, "samo_gpt")
    print(_described(settings), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    corpus = read(options.data, settings.model)
    plan = settings.plan
    problem = Text(corpus, settings.model, settings.batch, settings.micro_batch, options.validation_batches, plan.seed)
    sides = ("dense", "pruned") if options.side == "both" else (options.side,)
    outcomes = {side: launch(train, plan.ranks, problem, plan, side == "pruned", folder / side)[0] for side in sides}
    numbers = report.results(problem, plan, outcomes)
    print("\n" + report.table(numbers), end="\n\n")
    print(*report.write(numbers, folder), sep="\n")
    return 0


def _described(settings: Settings) -> str:
    with torch.device("meta"):
        model = GPT(settings.model)
    layers = layers_of(model, settings.plan.sparsity)
    pruned = sum(layer.numel - layer.kept for layer in layers)
    m = settings.model
    title = (
        f"GPT of {m.layers} blocks, hidden {m.hidden}, {m.heads} heads, {settings.batch} x {m.context} tokens a step"
    )
    return report.described(settings.plan, title, sum(layer.numel for layer in layers), pruned)
