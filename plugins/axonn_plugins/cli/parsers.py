"""The parsers of all commands: each is led up to the reading of its options, and nothing runs."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tyro

from axonn_plugins.cli.commands import COMMANDS, NAMED, Command, benchmarks, find, recipes


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


def parser(words: Sequence[str]) -> tuple[Any, type]:
    """The parser of a command's options, an `argparse.ArgumentParser`, and the dataclass that they become.

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


def every() -> Iterator[tuple[str, ...]]:
    """Every command with options, recipes and benchmarks among them."""
    yield from names()
    for command, those in zip(NAMED, (recipes(), benchmarks()), strict=True):
        yield from ((command, name) for name in those)


def names() -> Iterator[tuple[str, ...]]:
    """Every command with options that is no recipe."""
    for name, command in COMMANDS.items():
        if name == "cluster":
            yield from (("cluster", part) for part in ("up", "exec", "run", "status", "down"))
        elif isinstance(command, Command):
            yield (name,)
        else:
            yield from ((name, part) for part in command)
