"""The reference of the command line, from the commands themselves: each is asked for its options, and nothing runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from axonn_plugins.cli.commands import NAMED, benchmarks, recipes
from axonn_plugins.cli.parsers import names, parser

HIDDEN = ("--help",)


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
