"""``axonn train planner``: the figures and tables of 004 and of chapter 5 that come from models, as PNG and CSV."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro import conf

from axonn_plugins.cli.options import read
from axonn_plugins.config import ConfigError
from axonn_recipes.options import Run
from axonn_recipes.planner import dissertation, figures
from axonn_recipes.planner.megatron import megatron
from axonn_recipes.planner.outcome import Outcome
from axonn_recipes.runs import new_folder

EXPERIMENTS: dict[str, Callable[[], Outcome]] = {
    one.__name__: one
    for one in (
        figures.figure_1,
        figures.figure_2a,
        figures.figure_2b,
        figures.figure_3a,
        figures.figure_3b,
        figures.figure_4a,
        figures.figure_4b,
        figures.figure_5a,
        figures.figure_5b,
        figures.appendix_1,
        figures.appendix_2a,
        figures.appendix_2b,
        figures.appendix_3a,
        figures.appendix_3b,
        figures.appendix_4,
        figures.appendix_5a,
        figures.appendix_5b,
        figures.appendix_6a,
        figures.appendix_6b,
        dissertation.ranks,
        dissertation.table_5_2,
        dissertation.time_to_solution,
        megatron,
    )
}


@dataclass(frozen=True, kw_only=True)
class Options(Run):
    """The figures and tables of 004 and of chapter 5 that come from models, as PNG and CSV."""

    experiments: Annotated[
        conf.Positional[tuple[str, ...]],
        conf.arg(metavar="[NAME ...]", help=f"of {', '.join(EXPERIMENTS)}; by itself all"),
    ] = ()


def main(arguments: Sequence[str]) -> int:
    """Run the experiments that the command line names; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    options = read(Options, arguments, "axonn train planner")
    for name in options.experiments:
        if name not in EXPERIMENTS:
            near = difflib.get_close_matches(name, EXPERIMENTS, n=1, cutoff=0.0)[0]
            raise ConfigError(f'"{name}" is not an experiment; use "{near}", or another of {", ".join(EXPERIMENTS)}')
    names = options.experiments or list(EXPERIMENTS)
    folder = new_folder(options.runs, options.name, "planner")
    if options.dry_run:
        print("\n".join(f"{name}: {(EXPERIMENTS[name].__doc__ or '').splitlines()[0]}" for name in names))
        return 0
    folder.mkdir(parents=True)
    for name in names:
        _run(name, folder)
    return 0


def _run(name: str, folder: Path) -> None:
    begun = time.perf_counter()
    outcome = EXPERIMENTS[name]()
    spent = time.perf_counter() - begun
    written = outcome.write(folder / name)
    print(f"{name}: {(EXPERIMENTS[name].__doc__ or '').splitlines()[0]} {len(outcome.rows)} rows, {spent:.1f} s")
    for check in outcome.checks:
        print(f"  published: {check.published}; here: {check.ours}{'' if check.agrees else '  <- differs'}")
    print(f"  {', '.join(str(path) for path in written)}", flush=True)
