"""``axonn train samo_gpt``: a GPT dense and pruned with SAMO, on data-parallel ranks in plain PyTorch (000, Figure 4.4)."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_recipes.models.gpt import GPT
from axonn_recipes.pruned import report
from axonn_recipes.pruned.compare import compare
from axonn_recipes.runs import new_folder
from axonn_recipes.samo_gpt.problem import Text, read
from axonn_recipes.samo_gpt.settings import Settings, asked, resolve


def main(arguments: Sequence[str]) -> int:
    """Train both sides as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    options = asked(arguments)
    settings = resolve(options)
    folder = new_folder(options.runs, options.name, "samo_gpt")
    print(_described(settings), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    corpus = read(options.data, settings.model)
    plan = settings.plan
    problem = Text(corpus, settings.model, settings.batch, settings.micro_batch, options.validation_batches, plan.seed)
    return compare(problem, plan, options.side, folder)


def _described(settings: Settings) -> str:
    m = settings.model
    title = (
        f"GPT of {m.layers} blocks, hidden {m.hidden}, {m.heads} heads, {settings.batch} x {m.context} tokens a step"
    )
    return report.described(settings.plan, title, lambda: GPT(m))
