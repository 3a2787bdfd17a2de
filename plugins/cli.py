"""The command ``axonn``: train a recipe, look at the machine, write the schema."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import os
import sys
from importlib.resources import files
from pathlib import Path

from plugins import __version__
from plugins.config import ConfigError, schema
from plugins.launch import RankFailed

_BENCH = "bench_"


def recipes() -> list[str]:
    """Names of the installed recipes that train."""
    return [name for name in _folders() if not name.startswith(_BENCH)]


def benchmarks() -> list[str]:
    """Names of the installed benchmarks; the recipe of ``tp`` is in the folder bench_tp."""
    return [name.removeprefix(_BENCH) for name in _folders() if name.startswith(_BENCH)]


def _folders() -> list[str]:
    return sorted(folder.name for folder in files("recipes").iterdir() if folder.joinpath("recipe.py").is_file())


def _run(command: str, name: str | None, options: list[str], helped: bool) -> int:
    """Run a recipe of `train` or `bench` by its name, which is looked up now."""
    if command == "bench":
        # Before torch is imported: nobody knows host names in an emulated node, and c10d warns at every connection.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    what, known, prefix = ("benchmark", benchmarks(), _BENCH) if command == "bench" else ("recipe", recipes(), "")
    if name is None:
        print(f"usage: axonn {command} {what.upper()} [--help] [OPTIONS]\n{what}s: {', '.join(known)}")
        return 0 if helped else 2
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise ConfigError(f'"{name}" is not a {what}; use "{near[0]}", or another of {", ".join(known)}')
    return importlib.import_module(f"recipes.{prefix}{name}.recipe").main(options)


def _simulate(what: str | None, options: list[str], helped: bool) -> int:
    if what is None:
        print("usage: axonn simulate pccl [--help] [OPTIONS]")
        return 0 if helped else 2
    if what != "pccl":
        raise ConfigError(f'"{what}" cannot be simulated; use "pccl"')
    from plugins.pccl.simulate_cli import main as simulate

    return simulate(options)


def _samo(what: str | None, options: list[str], helped: bool) -> int:
    if what is None:
        print("usage: axonn samo memory MODEL [--help] [OPTIONS]")
        return 0 if helped else 2
    if what != "memory":
        raise ConfigError(f'"{what}" is nothing that axonn samo does; use "memory"')
    from plugins.samo.memory_cli import main as memory

    return memory(options)


def _ted(what: str | None, options: list[str], helped: bool) -> int:
    if what is None:
        print("usage: axonn ted memory [MODEL] [--help] [OPTIONS]")
        return 0 if helped else 2
    if what != "memory":
        raise ConfigError(f'"{what}" is nothing that axonn ted does; use "memory"')
    from plugins.ted.memory_cli import main as memory

    return memory(options)


def _test(what: str | None, options: list[str], helped: bool) -> int:
    if what is None:
        print("usage: axonn test ted [--help] [OPTIONS]")
        return 0 if helped else 2
    if what != "ted":
        raise ConfigError(f'"{what}" is nothing that axonn test does; use "ted"')
    from plugins.ted.regression_cli import main as regression

    return regression(options)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. A user's mistake is one sentence and 2."""
    parser = argparse.ArgumentParser(
        prog="axonn", description="AxoNN, TED, SAMO and PCCL for DeepSpeed and Megatron-core."
    )
    parser.add_argument("--version", action="version", version=f"axonn-plugins {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train a recipe: axonn train quickstart", add_help=False)
    train.add_argument("recipe", nargs="?")
    train.add_argument("options", nargs=argparse.REMAINDER)
    commands.add_parser("doctor", help="say what is installed, what works here and what is missing")
    write = commands.add_parser("schema", help='print the JSON schema of the "axonn" block')
    write.add_argument("--write", type=Path, metavar="FILE", help="write it to a file instead")
    ledger = commands.add_parser("ledger", help="the collectives of a run's last watched step: table and timeline")
    ledger.add_argument("run", type=Path, metavar="RUN", help="the run's folder, such as runs/quickstart")
    bench = commands.add_parser("bench", help="measure systems side by side: axonn bench tp", add_help=False)
    bench.add_argument("recipe", nargs="?")
    bench.add_argument("options", nargs=argparse.REMAINDER)
    simulate = commands.add_parser(
        "simulate", help="time schedules on a modelled machine: simulate pccl", add_help=False
    )
    simulate.add_argument("what", nargs="?")
    simulate.add_argument("options", nargs=argparse.REMAINDER)
    samo = commands.add_parser("samo", help="memory that training a pruned model takes: samo memory", add_help=False)
    samo.add_argument("what", nargs="?")
    samo.add_argument("options", nargs=argparse.REMAINDER)
    ted = commands.add_parser("ted", help="memory that training a mixture of experts takes: ted memory", add_help=False)
    ted.add_argument("what", nargs="?")
    ted.add_argument("options", nargs=argparse.REMAINDER)
    test = commands.add_parser("test", help="compare with stock DeepSpeed, also on a cluster: test ted", add_help=False)
    test.add_argument("what", nargs="?")
    test.add_argument("options", nargs=argparse.REMAINDER)
    commands.add_parser(
        "plan", help="which configuration to run: plan --model gpt-80b --machine perlmutter", add_help=False
    )
    emulate = "emulate a cluster on this machine: up, exec, run, status, down"
    commands.add_parser("cluster", help=emulate, add_help=False)
    arguments = sys.argv[1:] if arguments is None else arguments
    parsed, rest = parser.parse_known_args(arguments)
    with_subcommands = ("train", "bench", "simulate", "samo", "ted", "test")
    asks_for_help = rest in (["-h"], ["--help"]) and parsed.command in with_subcommands
    if rest and parsed.command not in ("cluster", "plan") and not asks_for_help:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if parsed.command == "cluster":
            from plugins.cluster.cli import main as cluster

            return cluster(rest)
        if parsed.command == "plan":
            from plugins.planner.cli import main as plan

            return plan(rest)
        if parsed.command == "simulate":
            return _simulate(parsed.what, parsed.options, asks_for_help)
        if parsed.command == "samo":
            return _samo(parsed.what, parsed.options, asks_for_help)
        if parsed.command == "ted":
            return _ted(parsed.what, parsed.options, asks_for_help)
        if parsed.command == "test":
            return _test(parsed.what, parsed.options, asks_for_help)
        if parsed.command == "doctor":
            from plugins.doctor import main as doctor

            return doctor()
        if parsed.command == "ledger":
            from plugins.ledger_report import main as ledger_of

            return ledger_of(parsed.run)
        if parsed.command == "schema":
            if parsed.write is None:
                print(schema(), end="")
            else:
                parsed.write.write_text(schema())
            return 0
        return _run(parsed.command, parsed.recipe, parsed.options, asks_for_help)
    except ConfigError as error:
        return _mistake(error)
    except RankFailed as failure:
        if isinstance(failure.error, ConfigError):
            return _mistake(failure.error)
        if isinstance(failure.error, BrokenPipeError):
            return 141  # whoever read the output has gone, as after | head
        print(f"axonn: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _mistake(error: ConfigError) -> int:
    print(f"axonn: error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
