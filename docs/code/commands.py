"""The reference of the command line, from the commands themselves: each is asked for its options, and nothing runs."""

from __future__ import annotations

import argparse
import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tyro

from axonn_plugins.cli.commands import COMMANDS, NAMED, Command, benchmarks, find, recipes

HIDDEN = ("--help",)


class Reached(BaseException):
    """A command has come to read its options."""

    def __init__(self, kind: type, named: Mapping[str, Any]) -> None:
        super().__init__(kind)
        self.kind, self.named = kind, dict(named)


@contextlib.contextmanager
def stopping(parse: bool = False) -> Iterator[None]:
    """Within, a command ends as soon as its options are to be read, or have been read.

    Args:
        parse: read them first, and let mistakes be raised.

    Raises:
        Reached: always, unless something else is.
    """
    original = tyro.cli

    def stop(kind: type, **named: Any) -> None:
        if parse:
            original(kind, **named)
        raise Reached(kind, named)

    tyro.cli = stop  # type: ignore[assignment]
    try:
        yield
    finally:
        tyro.cli = original


def parser(words: Sequence[str]) -> tuple[argparse.ArgumentParser, type]:
    """What reads the options of a command.

    Args:
        words: its name, such as ("cluster", "up").
    """
    try:
        with stopping(), contextlib.redirect_stdout(io.StringIO()):
            command, rest = find([*words, "--help"])
            command(rest)
    except Reached as reached:
        named = {key: value for key, value in reached.named.items() if key != "args"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return tyro.extras.get_parser(reached.kind, **named), reached.kind
    raise RuntimeError(f"axonn {' '.join(words)} reads no options")


def names() -> Iterator[tuple[str, ...]]:
    """Every command with options."""
    for name, command in COMMANDS.items():
        if name == "cluster":
            yield from (("cluster", part) for part in ("up", "exec", "run", "status", "down"))
        elif isinstance(command, Command):
            yield (name,)
        else:
            yield from ((name, part) for part in command)


def section(words: Sequence[str], level: int = 2) -> list[str]:
    """A command: what it does, how it is written, its options."""
    found, kind = parser(words)
    said = (kind.__doc__ or "").partition("Attributes:")[0].strip()
    rows, places = [], []
    for action in found._actions:
        if action.option_strings and set(action.option_strings) & set(HIDDEN):
            continue
        default, text = _parts(action)
        if not action.option_strings:
            places.append(str(action.metavar or action.dest).upper())
            rows.append(f"| `{places[-1]}` | {text} | {default} |")
        else:
            takes = " ".join([action.metavar] if isinstance(action.metavar, str) else action.metavar or ())
            takes = "" if isinstance(action, argparse.BooleanOptionalAction) else takes.replace("|", ", ")
            flag = f"{action.option_strings[-1] if len(action.option_strings[0]) < 3 else action.option_strings[0]} {takes}".strip()
            rows.append(f"| `{flag}` | {text} | {default} |")
    usage = " ".join(filter(None, ["axonn", *words, *places, "[OPTIONS]" if len(rows) > len(places) else ""]))
    out = [f"{'#' * level} axonn {' '.join(words)}", "", said, "", "```", usage, "```", ""]
    return [*out, *(["| option | | default |", "|---|---|---|", *rows, ""] if rows else [])]


def _parts(action: argparse.Action) -> tuple[str, str]:
    """The default and the description, which tyro writes behind one another."""
    text = str(action.help or "").replace("%%", "%").replace("\n", " ")
    head, mark, tail = text.rpartition("(")
    default = ""
    if mark and tail.endswith(")") and tail.startswith(("default:", "required", "optional", "sets:", "fixed")):
        text, default = head.strip(), tail[:-1].removeprefix("default:").strip()
        default = "must be given" if default == "required" else "" if default == "None" else f"`{default}`"
    return default.replace("|", "\\|"), text.replace("|", "\\|")


def page() -> str:
    """Commands that are no recipe."""
    out = [
        "# The command line",
        "",
        "Every command says the same with `--help`. A mistake is one sentence, and the exit code 2.",
        "",
        f"[Benchmarks and recipes](recipes.md) have their own page: {', '.join(f'`axonn {name}`' for name in NAMED)}.",
        "",
    ]
    for words in names():
        out += section(words)
    return "\n".join(out)


def recipe_page() -> str:
    """Benchmarks and recipes, which are found by their folders."""
    out = ["# Benchmarks and recipes: options", "", "Their figures are under Benchmarks in the menu.", ""]
    for command, those in (("bench", benchmarks()), ("train", recipes())):
        out += [f"## axonn {command}", ""]
        for name in those:
            out += section((command, name), 3)
    return "\n".join(out)
