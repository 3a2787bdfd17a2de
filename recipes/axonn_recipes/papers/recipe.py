"""``axonn train papers``: every table and figure of the papers, published and obtained numbers beside each other, with a verdict."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from axonn_plugins.cli.options import read
from axonn_plugins.cluster.launch import RankFailed
from axonn_plugins.config import ConfigError
from axonn_plugins.observe.files import put
from axonn_plugins.observe.progress import say
from axonn_recipes.bench.output import aligned
from axonn_recipes.options import Run
from axonn_recipes.papers import page
from axonn_recipes.papers.data import Row, by_experiment, load, select
from axonn_recipes.papers.experiments import EXPERIMENTS
from axonn_recipes.papers.found import MEASURED, Found
from axonn_recipes.papers.verdict import Judged, as_json, judge
from axonn_recipes.runs import new_folder

PAGES = ("index.html", "papers.md", "results.json")


@dataclass(frozen=True, kw_only=True)
class Options(Run):
    """Every table and figure of the papers: published and obtained numbers beside each other, with a verdict.

    Attributes:
        only: seeds, chapters, tables or figures, with commas between, such as "000 fig 4.6, 003 table III, 000 chapter 6".
        all: also what takes long; by itself only what is named is run if it takes more than 30 seconds.
        quick: measurements of this machine in their short form, with fewer rounds, steps or sizes.
        list: print the rows, how each is reproduced and what that takes.
        coverage: write the table of coverage to this file, and run nothing.
    """

    only: str | None = None
    all: bool = False
    quick: bool = False
    list: bool = False
    coverage: Path | None = None


def main(arguments: Sequence[str]) -> int:
    """Run what the command line names; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    options = read(Options, arguments, "axonn train papers")
    rows = load()
    if options.coverage is not None:
        _write_coverage(options.coverage, rows)
        return 0
    chosen = select(rows, options.only) if options.only is not None else list(rows)
    if options.list:
        print(_listed(chosen, options.quick))
        return 0
    folder = new_folder(options.runs, options.name, "papers")
    names = [name for name in by_experiment(chosen) if options.only or options.all or EXPERIMENTS[name].unasked]
    seconds = sum(EXPERIMENTS[name].form(options.quick).seconds for name in names)
    print(f"{len(chosen)} tables and figures, {len(names)} experiments, about {_time(seconds)}", flush=True)
    if options.dry_run:
        return 0
    folder.mkdir(parents=True)
    judged: list[Judged] = []
    for results, pictures in run(names, folder, options.quick):
        judged = [judge(row, results) for row in chosen]
        _write(folder, judged, pictures)
    print()
    print(aligned([(one.row.name, one.verdict) for one in judged]))
    print(f"\n{page.summary(judged)}")
    print(*(folder / name for name in PAGES), sep="\n")
    return 0


def run(
    names: Sequence[str], folder: Path, quick: bool = False
) -> Iterator[tuple[dict[str, Found], dict[str, list[Path]]]]:
    """Run experiments, and draw their pictures into the folder.

    Args:
        names: of experiments.
        folder: of the run.
        quick: whether in their short form.

    Yields:
        Before the first and after each: what those so far found, and their pictures relative to the folder. A measurement that this machine
        cannot make is said, and left out.

    Raises:
        ConfigError: a model, a machine or another file that is read is wrong.
    """
    results: dict[str, Found] = {}
    pictures: dict[str, list[Path]] = {}
    yield results, pictures
    seconds = [EXPERIMENTS[name].form(quick).seconds for name in names]
    for done, name in enumerate(names):
        experiment = EXPERIMENTS[name]
        if experiment.root and os.geteuid():
            print(f"{name}: left out, for it emulates a cluster, which needs root", flush=True)
            continue
        begun = time.perf_counter()
        say(f"{name}: {done} of {len(names)} are done, about {_time(sum(seconds[done:]))} are left")
        try:
            results[name] = found = experiment.form(quick).run(folder / name)
        except (ConfigError, RankFailed, TimeoutError) as error:
            if experiment.kind != MEASURED:  # no machine is at fault
                raise
            print(f"{name}: left out: {str(error).splitlines()[0]}", flush=True)
            continue
        print(f"{name}: {experiment.kind}, {time.perf_counter() - begun:.1f} s", flush=True)
        drawn = [file for end, picture in found.pictures.items() for file in picture.save(folder / f"{name}_{end}.png")]
        pictures[name] = [file.relative_to(folder) for file in (*drawn, *found.files)]
        yield results, pictures


def _write(folder: Path, judged: Sequence[Judged], pictures: Mapping[str, Sequence[Path]]) -> None:
    content = {
        "index.html": page.page(judged, pictures),
        "papers.md": page.markdown(judged, pictures),
        "results.json": json.dumps([as_json(one) for one in judged], indent=1) + "\n",
    }
    for name in PAGES:
        put(folder / name, content[name])


def _listed(rows: Sequence[Row], quick: bool) -> str:
    lines = [("", "how", "takes", "what it shows")]
    for row in rows:
        runs = [EXPERIMENTS[name] for name in row.runs]
        how = ", ".join(dict.fromkeys(one.kind for one in runs)) or row.coverage
        takes = _time(sum(one.form(quick).seconds for one in runs)) if runs else "-"
        lines.append((row.name, how, takes, row.caption))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join("  ".join([*map(str.ljust, line[:3], widths), line[3]]).rstrip() for line in lines)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _write_coverage(file: Path, rows: Sequence[Row]) -> None:
    try:
        put(file, page.coverage(rows))
    except OSError as error:
        raise ConfigError(
            f"--coverage = {file} cannot be written: {error.strerror}; give a file in a folder that exists"
        ) from None
    print(file)
