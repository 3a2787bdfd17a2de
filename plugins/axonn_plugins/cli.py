"""The command ``axonn``: train a recipe, look at the machine, write the schema."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import NoReturn

from axonn_plugins import __version__
from axonn_plugins.cluster.launch import RankFailed
from axonn_plugins.config import ConfigError, schema

_BENCH = "bench_"
_READER_GONE = 141
"""The exit code where whoever read the output has gone, as after ``| head``: a shell's for SIGPIPE."""


@dataclass(frozen=True)
class _Part:
    """What a command with one subcommand does, the subcommand's name and its first argument, and where it is."""

    help: str
    name: str
    argument: str
    module: str


_PARTS = {
    "simulate": _Part("time schedules on a modelled machine", "pccl", "", "axonn_plugins.pccl.simulate_cli"),
    "samo": _Part("memory that training a pruned model takes", "memory", "MODEL ", "axonn_plugins.samo.memory_cli"),
    "ted": _Part(
        "memory that training a mixture of experts takes", "memory", "[MODEL] ", "axonn_plugins.ted.memory_cli"
    ),
    "test": _Part("compare with stock DeepSpeed, also on a cluster", "ted", "", "axonn_plugins.ted.regression_cli"),
}


def recipes() -> list[str]:
    """Names of the installed recipes that train."""
    return [name for name in _folders() if not name.startswith(_BENCH)]


def benchmarks() -> list[str]:
    """Names of the installed benchmarks; the recipe of ``tp`` is in the folder bench_tp."""
    return [name.removeprefix(_BENCH) for name in _folders() if name.startswith(_BENCH)]


def _folders() -> list[str]:
    return sorted(folder.name for folder in files("axonn_recipes").iterdir() if folder.joinpath("recipe.py").is_file())


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
    return importlib.import_module(f"axonn_recipes.{prefix}{name}.recipe").main(options)


def _part(command: str, what: str | None, options: list[str], helped: bool) -> int:
    """Run what stands behind `simulate`, `samo`, `ted` or `test`."""
    part = _PARTS[command]
    if what is None:
        print(f"usage: axonn {command} {part.name} {part.argument}[--help] [OPTIONS]")
        return 0 if helped else 2
    if what != part.name:
        raise ConfigError(f'"{what}" is nothing that axonn {command} does; use "{part.name}"')
    return importlib.import_module(part.module).main(options)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. A user's mistake is one sentence and 2."""
    parser = _parser()
    parsed, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    with_subcommands = ("train", "bench", *_PARTS)
    helped = rest in (["-h"], ["--help"]) and parsed.command in with_subcommands
    if rest and parsed.command not in ("cluster", "plan") and not helped:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        code = _command(parsed, rest, helped)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _mistake(error)
    except RankFailed as failure:
        if isinstance(failure.error, ConfigError):
            return _mistake(failure.error)
        if isinstance(failure.error, BrokenPipeError):
            return _READER_GONE
        print(f"axonn: {failure}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # What Python would still flush at exit has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="axonn", description="AxoNN, TED, SAMO and PCCL for DeepSpeed and Megatron-core."
    )
    parser.add_argument("--version", action="version", version=f"axonn-plugins {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="say what is installed, what works here and what is missing")
    write = commands.add_parser("schema", help='print the JSON schema of the "axonn" block')
    write.add_argument("--write", type=Path, metavar="FILE", help="write it to a file instead")
    ledger = commands.add_parser("ledger", help="the collectives of a run's last watched step: table and timeline")
    ledger.add_argument("run", type=Path, metavar="RUN", help="the run's folder, such as runs/quickstart")
    named = {
        "train": "train a recipe: axonn train quickstart",
        "bench": "measure systems side by side: axonn bench tp",
        **{command: f"{part.help}: {command} {part.name}" for command, part in _PARTS.items()},
    }
    for command, said in named.items():
        one = commands.add_parser(command, help=said, add_help=False)
        one.add_argument("what", nargs="?")
        one.add_argument("options", nargs=argparse.REMAINDER)
    planned = "which configuration to run: plan --model gpt-80b --machine perlmutter"
    commands.add_parser("plan", help=planned, add_help=False)
    commands.add_parser(
        "cluster", help="emulate a cluster on this machine: up, exec, run, status, down", add_help=False
    )
    return parser


def _command(parsed: argparse.Namespace, rest: list[str], helped: bool) -> int:
    """Do what was asked; modules are imported when they are."""
    if parsed.command in ("train", "bench"):
        return _run(parsed.command, parsed.what, parsed.options, helped)
    if parsed.command in _PARTS:
        return _part(parsed.command, parsed.what, parsed.options, helped)
    if parsed.command == "cluster":
        from axonn_plugins.cluster.cli import main as cluster

        return cluster(rest)
    if parsed.command == "plan":
        from axonn_plugins.planner.cli import main as plan

        return plan(rest)
    if parsed.command == "doctor":
        from axonn_plugins.observe.doctor import main as doctor

        return doctor()
    if parsed.command == "ledger":
        from axonn_plugins.observe.ledger_report import main as ledger_of

        return ledger_of(parsed.run)
    if parsed.write is None:
        print(schema(), end="")
    else:
        parsed.write.write_text(schema())
    return 0


def _mistake(error: ConfigError) -> int:
    print(f"axonn: error: {error}", file=sys.stderr)
    return 2


def run() -> NoReturn:
    """The command: `main`, and the end of the process."""
    code = main()
    if "RANK" in os.environ:
        # A rank has said all: threads of its libraries, which may still run when the interpreter ends, must not abort it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
