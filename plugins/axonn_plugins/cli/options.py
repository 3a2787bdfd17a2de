"""Options are the fields of a dataclass, whose docstring says what they are; what is wrong with them is one sentence."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tyro
from tyro import _errors as wrong
from tyro.conf import (
    DisallowNone,
    FlagCreatePairsOff,
    HelptextFromCommentsOff,
    Positional,
    PositionalMetavarFromFieldName,
    SuppressFixed,
)

from axonn_plugins.config.base import ConfigError

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class OfRun:
    """Options of a command on a run that there is.

    Attributes:
        run: the run's folder, such as runs/quickstart.
    """

    run: PositionalMetavarFromFieldName[Positional[Path]]


def read(kind: type[Kind], arguments: Sequence[str], prog: str = "axonn", default: Kind | None = None) -> Kind:
    """Options of a command line.

    Args:
        kind: a dataclass; a field ``dry_run`` is the option ``--dry-run``.
        arguments: what stands behind the command.
        prog: the command.
        default: what options have that are not given; else the fields' own.

    Raises:
        ConfigError: the first mistake.
        SystemExit: help was asked for, and has been printed.
    """

    def refuse(event: wrong.ParseErrorEvent) -> None:
        if sentence := _sentence(event):
            raise ConfigError(f"{sentence}; {prog} --help says what there is")

    defaults: dict[str, Any] = {} if default is None else {"default": default}
    # What is on by default can be said both ways.
    on = default is not None and any(value is True for value in vars(default).values())
    markers = (HelptextFromCommentsOff, DisallowNone, SuppressFixed, *(() if on else (FlagCreatePairsOff,)))
    with wrong.on_parse_error(refuse):
        return tyro.cli(kind, prog=prog, args=[*arguments], config=markers, **defaults)


def check_folder(option: str, folder: Path) -> None:
    """Refuse a folder that is none, and cannot become one.

    Args:
        option: by which it was given.
        folder: where files are to be written; it and those above it are made where they are missing.

    Raises:
        ConfigError: a file is in its place, or nothing may be written there.
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f'{option} = "{folder}" cannot be a folder, since {there} is a file; give another')
    if not os.access(there, os.W_OK):
        raise ConfigError(f'{option} = "{folder}" cannot be written, since {there} is not yours to write; give another')


def _sentence(event: wrong.ParseErrorEvent) -> str | None:
    """Word a mistake; None where tyro is to say it."""
    if isinstance(event, wrong.UnrecognizedArgs):
        return f"unrecognized arguments: {' '.join(event.tokens)}"
    if isinstance(event, wrong.MissingArgs):
        missing = ", ".join(_name(one.arg) for one in event.missing_arguments)
        return f"these arguments are required: {missing}"
    if isinstance(event, wrong.MissingMutexGroup):
        groups = " and ".join(" or ".join(_name(one.arg) for one in group) for group in event.groups)
        return f"one of these arguments is required: {groups}"
    if isinstance(event, wrong.MutexConflict):
        return f"{event.second_token} is not allowed with {event.first_token}"
    if isinstance(event, wrong.InvalidChoice):
        choices = [choice for choice in event.choices if choice != "None"]  # which is what leaving it out means
        near = difflib.get_close_matches(event.value, choices, n=1, cutoff=0.0)[0]
        others = ", ".join(choices)
        return f'{_name(event.argument)} = "{event.value}" is not known; use "{near}", or another of {others}'
    if isinstance(event, wrong.BadValue):
        return f"{_name(event.argument)} is not given what it needs"
    if isinstance(event, wrong.InstantiationFailure):
        return event.message if event.argument is None else _misread(event.argument, event.message)
    return None


def _misread(argument: Any, message: str) -> str:
    """Word a value that cannot be read, of which tyro's message has the text in quotes."""
    kind = argument.lowered.metavar or ""
    takes = {"INT": "a whole number", "FLOAT": "a number"}.get(kind, kind)
    if argument.field.type_stripped is int:  # also where the word for it is its own
        takes = "a whole number"
    given = " ".join(re.findall(r"'([^']*)'", message.partition("\n")[0]))
    return f'{_name(argument)} = "{given}" is not {takes}'


def _name(argument: Any) -> str:
    return argument.lowered.metavar if argument.is_positional() else argument.display_name()
