"""The command ``axonn``: its commands are found by their names, and imported when they are asked for."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from axonn_plugins.cli.commands import benchmarks, find, recipes

__all__ = ["benchmarks", "main", "recipes", "run"]

_READER_GONE = 141
"""The exit code where whoever read the output has gone, as after ``| head``: a shell's for SIGPIPE."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. A user's mistake is one sentence and 2."""
    try:
        command, rest = find(sys.argv[1:] if arguments is None else arguments)
        code = command(rest)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # What Python would still flush at exit has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> int:
    """Say what went wrong where it is the user's, or a rank's; else it goes on."""
    from axonn_plugins.cluster.launch import RankFailed
    from axonn_plugins.config.base import ConfigError

    cause = error.error if isinstance(error, RankFailed) else error
    if isinstance(cause, ConfigError):
        print(f"axonn: error: {cause}", file=sys.stderr)
        return 2
    if isinstance(cause, BrokenPipeError):
        return _READER_GONE
    if isinstance(error, RankFailed):
        print(f"axonn: {error}", file=sys.stderr)
        return 1
    raise error


def run() -> NoReturn:
    """The command: `main`, and the end of the process."""
    code = main()
    if "RANK" in os.environ:
        # A rank has said all: threads of its libraries, which may still run when the interpreter ends, must not abort it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
