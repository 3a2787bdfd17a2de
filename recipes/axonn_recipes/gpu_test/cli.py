"""``axonn test gpu``: every system on the GPUs that are here, beside its stock peer, its numbers beside the serial model's.

By itself it starts a rank on each GPU of this machine; under torchrun or srun it runs on the ranks that are there.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tyro import conf

from axonn_plugins.cli.options import check_folder, read
from axonn_plugins.config import ConfigError
from axonn_plugins.observe.files import put
from axonn_recipes.gpu_test.launchers import as_rank, sharing


@dataclass(frozen=True, kw_only=True)
class Options:
    """Every system on the GPUs that are here, beside its stock peer; numbers are checked against the serial model. Exit code 1 if one differs or fails.

    By itself it starts a rank on each GPU of this machine; under torchrun or srun it runs on the ranks that are there.

    Attributes:
        dry: the same code on CPU ranks with gloo and tiny models, to see that it runs; no time of it means anything.
        share: the same code on ranks that share this machine's GPUs, with NCCL and tiny models, to see that numbers are right with more ranks than
            GPUs; no time of it means anything. Not with a launcher.
        ranks: started on this machine; by itself one a GPU, or 4 of a run that is dry or shares. Not with a launcher.
        only: a system, such as tensor_parallel; may be repeated.
        rounds: timed steps of each side; by itself 10, or 1 of a run that is dry or shares.
        patience: seconds that a system may take.
        report: the file, of which .json and .md are written.
    """

    dry: bool = False
    share: bool = False
    ranks: int | None = None
    only: conf.UseAppendAction[tuple[str, ...]] = ()
    rounds: int | None = None
    patience: float = 900.0
    report: Path = Path("axonn-gpu")


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    # Asked of the driver, so that no process touches a GPU before it is alone with it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        return _main(arguments)
    except ConfigError:
        if os.environ.get("RANK", "0") != "0":
            return 2  # the first rank says it for all
        raise


def _main(arguments: Sequence[str]) -> int:
    options = read(Options, arguments, "axonn test gpu")
    started = as_rank()
    _check(options, started)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    ranks, local = _ranks(options, started)
    if started:
        return _agent(options, ranks, local)
    if options.dry:
        _import_before_forks()
    from axonn_plugins.cluster.launch import launch

    return launch(_forked, ranks, options, ranks, local, place=sharing if options.share else None)[0]


def _check(options: Options, started: bool) -> None:
    from axonn_recipes.gpu_test.systems import SYSTEMS

    check_folder("--report", options.report.parent)
    for name in options.only:
        if name not in SYSTEMS:
            raise ConfigError(f'--only = "{name}" is no system; choose from {", ".join(SYSTEMS)}')
    for name in ("ranks", "rounds", "patience"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name} = {value:g} is not a positive number; leave it out, or give one")
    if options.share and (options.dry or started):
        other = "--dry has no GPUs" if options.dry else "a launcher gives each rank its own GPU"
        raise ConfigError(f"--share is for ranks that share GPUs, but {other}; leave one of them out")
    if options.ranks is not None and started:
        raise ConfigError(
            f"--ranks = {options.ranks}, but the launcher started {os.environ['WORLD_SIZE']}; leave --ranks out"
        )


def _ranks(options: Options, started: bool) -> tuple[int, int]:
    """Ranks of the run and of a node."""
    import torch

    here = 0 if options.dry else torch.cuda.device_count()
    if not options.dry and here == 0:
        raise ConfigError(
            f"axonn test gpu needs a GPU, and torch {torch.__version__} sees none on this machine; run it where there is one, "
            "or add --dry to run the same code on CPU ranks"
        )
    if started:
        return int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    ranks = options.ranks or (0 if options.share else here) or 4
    if not options.dry and not options.share and ranks > here:
        raise ConfigError(
            f"--ranks = {ranks} is more than the {here} GPUs of this machine; give at most {here}, or add --share"
        )
    return ranks, ranks


def _import_before_forks() -> None:
    """Import once, in the process from which they are forked, the modules that every system's processes need."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from axonn_recipes.gpu_test.systems import SYSTEMS

    for system in SYSTEMS.values():
        if system.unfit(system.ranks) is None:
            import_module(system.module)


def _forked(options: Options, ranks: int, local: int) -> int:
    """An agent that removes what its systems leave behind when it is told to stop."""

    def stop(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # a terminal says it, and the launcher again
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return _agent(options, ranks, local)


def _agent(options: Options, ranks: int, local: int) -> int:
    """Every rank's part; the first prints and writes."""
    from axonn_recipes.gpu_test import agents, report
    from axonn_recipes.gpu_test.scale import scale_of
    from axonn_recipes.gpu_test.systems import SYSTEMS

    scale = scale_of("cpu" if options.dry else "cuda", options.dry or options.share, ranks, local, options.rounds)
    chosen = [name for name in SYSTEMS if name in (options.only or SYSTEMS)]
    left_out = {name: reason for name in chosen if (reason := SYSTEMS[name].unfit(ranks))}
    first = os.environ["RANK"] == "0"
    if first:
        where = "CPUs" if options.dry else "shared GPUs" if options.share else "GPUs"
        print(f"axonn test gpu: {len(chosen)} systems, {ranks} ranks, {where}", flush=True)
    names = [name for name in chosen if name not in left_out]
    outcomes: list[agents.Outcome] = []

    def heard(outcome: agents.Outcome) -> None:
        outcomes.append(outcome)
        print(report.line(outcome), flush=True)
        numbers = report.report(scale, options.share, outcomes, left_out)
        _write(options.report, numbers, report.markdown(numbers))  # so far: whoever ends the run has it

    agents.run(names, scale, options.patience, heard)
    if not first:
        return 0
    for name, reason in left_out.items():
        print(f"{name:<16} left out: {reason}")
    for path in _reports(options.report):
        print(path)
    wrong = [outcome.name for outcome in outcomes if report.verdict(outcome) != "ok"]
    print(f"{len(outcomes) - len(wrong)} of {len(outcomes)} systems ok{': not ' if wrong else ''}{', '.join(wrong)}")
    return 1 if wrong else 0


def _write(path: Path, numbers: dict[str, Any], text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, content in zip(
        _reports(path), (json.dumps(_strict(numbers), indent=1, allow_nan=False), text), strict=True
    ):
        put(file, content + "\n")


def _reports(path: Path) -> list[Path]:
    return [path.with_name(path.name + suffix) for suffix in (".json", ".md")]


def _strict(value: Any) -> Any:
    """The same with words for numbers that JSON has not: infinity, and what is none."""
    if isinstance(value, dict):
        return {key: _strict(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
