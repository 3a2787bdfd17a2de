"""Which commands there are, and what is said of them; nothing here imports what they stand on."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

Main = Callable[[list[str]], int]
"""Runs a command with what stands behind its name; returns the exit code."""


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        help: what it does, in a line.
        module: where its `main` is.
        usage: what is written between its name and its options.
    """

    help: str
    module: str
    usage: str = ""

    def main(self) -> Main:
        """The function that runs the command."""
        return importlib.import_module(self.module).main


COMMANDS: Mapping[str, Command | Mapping[str, Command]] = {
    "doctor": Command("say what is installed, what works here and what is missing", "axonn_plugins.cli.doctor"),
    "check": Command(
        "say what a ds_config.json comes to, without starting a rank", "axonn_plugins.cli.check", "DS_CONFIG [SCRIPT]"
    ),
    "completion": Command(
        "print the completion of these commands for a shell", "axonn_plugins.cli.completion", "SHELL"
    ),
    "schema": Command('print the JSON schema of the "axonn" block', "axonn_plugins.cli.schema"),
    "ledger": Command(
        "the collectives of a run's last watched step: table and timeline", "axonn_plugins.cli.ledger", "RUN"
    ),
    "timeline": Command(
        "where each millisecond of a watched step went, on every rank", "axonn_plugins.cli.timeline", "RUN"
    ),
    "report": Command(
        "a run as one HTML page: loss, throughput, memory, communication", "axonn_plugins.cli.report", "RUN"
    ),
    "layers": Command(
        'what plan = "auto" makes of a model\'s layers, and what each sends', "axonn_plugins.cli.layers", "MODEL"
    ),
    "convert": Command(
        "weights from and to HF, LitGPT, Megatron and our checkpoints", "axonn_plugins.cli.convert", "SOURCE TARGET"
    ),
    "generate": Command("continue a text by a model of any of these", "axonn_plugins.cli.generate", "FOLDER"),
    "plan": Command("which configuration to run, how long it takes and why it wins", "axonn_plugins.planner.cli"),
    "cluster": Command("emulate a cluster on this machine: up, exec, run, status, down", "axonn_plugins.cluster.cli"),
    "simulate": {"pccl": Command("time schedules on a modelled machine", "axonn_plugins.pccl.simulate_cli")},
    "samo": {
        "memory": Command("memory that training a pruned model takes", "axonn_plugins.samo.memory_cli", "MODEL"),
    },
    "ted": {
        "memory": Command("memory that training a mixture of experts takes", "axonn_plugins.ted.memory_cli", "[MODEL]"),
    },
    "test": {
        "gpu": Command("run every system on the GPUs here, beside its stock peer", "axonn_recipes.gpu_test.cli"),
        "ted": Command("compare with stock DeepSpeed-MoE, also on a cluster", "axonn_plugins.ted.regression_cli"),
        "soak": Command(
            "train while ranks, nodes and links fail, on an emulated cluster", "axonn_recipes.soak_test.cli"
        ),
    },
}
NAMED = {
    "train": ("recipe", "train a recipe", ""),
    "bench": ("benchmark", "measure systems side by side", "bench_"),
}
"""Commands whose parts are installed recipes: what one is called, what it does, and how the names of folders begin."""


def find(arguments: list[str]) -> tuple[Main, list[str]]:
    """Find the function that runs a command line, and the arguments that are left for it.

    Raises:
        ConfigError: there is no such command.
    """
    name, rest = (arguments[0], arguments[1:]) if arguments else (None, [])
    if name in (None, "-h", "--help"):
        return partial(_say, _all(), 2 if name is None else 0), []
    if name == "--version":
        from axonn_plugins import __version__

        return partial(_say, f"axonn-plugins {__version__}", 0), []
    if name in NAMED:
        return _recipe(name, rest)
    known = [*COMMANDS, *NAMED]
    if name not in COMMANDS:
        _unknown(f'"{name}" is no command of axonn', name, known)
    command = COMMANDS[name]
    return (command.main(), rest) if isinstance(command, Command) else _part(name, command, rest)


def _part(name: str, parts: Mapping[str, Command], rest: list[str]) -> tuple[Main, list[str]]:
    if not rest or rest[0] in ("-h", "--help"):
        lines = [_usage(f"{name} {part}", command) for part, command in parts.items()]
        return partial(_say, "\n".join(lines), 0 if rest else 2), []
    if rest[0] not in parts:
        _unknown(f'"{rest[0]}" is nothing that axonn {name} does', rest[0], list(parts))
    return parts[rest[0]].main(), rest[1:]


def _recipe(command: str, rest: list[str]) -> tuple[Main, list[str]]:
    what, _, prefix = NAMED[command]
    known = _folders(prefix)
    if not rest or rest[0] in ("-h", "--help"):
        lines = [f"usage: axonn {command} {what.upper()} [--help] [OPTIONS]", "", f"{what}s:", *_listed(known)]
        return partial(_say, "\n".join(lines), 0 if rest else 2), []
    if rest[0] not in known:
        _unknown(f'"{rest[0]}" is not a {what}', rest[0], list(known))
    if command == "bench":
        # Before torch is imported: nobody knows host names in an emulated node, and c10d warns at every connection.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    else:
        from axonn_plugins.observe.trackers import named

        named()  # a mistake in it is said before any rank is started
    return importlib.import_module(f"axonn_recipes.{prefix}{rest[0]}.recipe").main, rest[1:]


def recipes() -> list[str]:
    """Names of the installed recipes that train."""
    return list(_folders(NAMED["train"][2]))


def benchmarks() -> list[str]:
    """Names of the installed benchmarks; the recipe of ``tp`` is in the folder bench_tp."""
    return list(_folders(NAMED["bench"][2]))


def _folders(prefix: str) -> dict[str, str]:
    """Recipes and what each does, from the first line of its module, which is not imported."""
    found = {}
    others = tuple(begin for _, _, begin in NAMED.values() if begin != prefix and begin.startswith(prefix))
    for folder in sorted(_installed(), key=lambda one: one.name):
        module = folder / "recipe.py"
        if folder.name.startswith(prefix) and not folder.name.startswith(others) and module.is_file():
            said = ast.get_docstring(ast.parse(module.read_text())) or ""
            found[folder.name.removeprefix(prefix)] = said.partition("\n")[0].partition("``: ")[2]
    return found


def _installed() -> list[Path]:
    """Files and folders of axonn_recipes, which is not imported."""
    package = importlib.util.find_spec("axonn_recipes")
    places = package.submodule_search_locations if package else None
    return [folder for place in places or () for folder in Path(place).iterdir()]


def _listed(lines: Mapping[str, str]) -> list[str]:
    width = max(len(name) for name in lines)
    return [f"  {name:<{width}}  {said}" for name, said in lines.items()]


def _all() -> str:
    named: dict[str, str] = {}
    for name, command in COMMANDS.items():
        if isinstance(command, Command):
            named[name] = command.help
        else:
            named |= {f"{name} {part}": one.help for part, one in command.items()}
    named |= {f"{name} {what.upper()}": f"{said}: axonn {name} --help" for name, (what, said, _) in NAMED.items()}
    return "\n".join(
        [
            "usage: axonn [--help] [--version] COMMAND [--help] [OPTIONS]",
            "",
            "AxoNN, TED, SAMO and PCCL for DeepSpeed and Megatron-core.",
            "",
            *_listed(named),
        ]
    )


def _usage(name: str, command: Command) -> str:
    return " ".join(filter(None, ("usage: axonn", name, command.usage, "[--help] [OPTIONS]")))


def _say(text: str, code: int, rest: list[str]) -> int:
    print(text)
    return code


def _unknown(said: str, name: str, known: list[str]) -> NoReturn:
    from axonn_plugins.config.base import ConfigError

    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    others = f", or another of {', '.join(known)}" if len(known) > 1 else ""
    raise ConfigError(f'{said}; use "{near}"{others}')
