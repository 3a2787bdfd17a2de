"""The command ``axonn``: its commands are found by their names, and imported when they are asked for."""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import suppress
from typing import Any, NoReturn

from axonn_plugins.cli.commands import benchmarks, find, recipes

__all__ = ["benchmarks", "main", "recipes", "run"]

_stopped = False
_OF_FILES = {
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EROFS),
    *(errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST),
}
"""Errors of a file that a user has named, which are no fault of ours."""
_READER_GONE = 141
"""The exit code where whoever read the output has gone, as after ``| head``: a shell's for SIGPIPE."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. A user's mistake is one sentence and 2."""
    try:
        command, rest = find(sys.argv[1:] if arguments is None else arguments)
        code = command(rest)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as error:
        return _interrupted(error)
    except BrokenPipeError:
        # What Python would still flush at exit has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE
    except Exception as error:
        # Some libraries make another error of an interrupt.
        return _interrupted(KeyboardInterrupt()) if _stopped else _failed(error)


def _interrupted(error: KeyboardInterrupt) -> int:
    """Say that the command was stopped; returns a shell's exit code for it, 130 after Ctrl-C."""
    number = getattr(error, "number", signal.SIGINT)
    if os.environ.get("RANK", "0") == "0":  # one rank says it for all
        begin = "\n" if sys.stderr.isatty() else ""  # a terminal has written ^C, or a progress bar stands there
        with suppress(OSError):
            print(f"{begin}axonn: {'interrupted' if number == signal.SIGINT else 'terminated'}", file=sys.stderr)
    exec("")  # else Python, which notes an interrupt that goes through an exec, ends by SIGINT and not with our code
    return 128 + number


def _failed(error: Exception) -> int:
    """Say what went wrong where it is the user's, or a rank's; else it goes on."""
    from axonn_plugins.cluster.launch import RankFailed
    from axonn_plugins.config.base import ConfigError

    cause = error.error if isinstance(error, RankFailed) else error
    if isinstance(cause, OSError) and cause.errno in _OF_FILES and cause.filename is not None:
        cause = ConfigError(f'"{cause.filename}" cannot be used: {cause.strerror}; give another, or make room for it')
    if isinstance(cause, ConfigError):
        print(f"axonn: error: {cause}", file=sys.stderr)
        return 2
    if isinstance(cause, BrokenPipeError):
        return _READER_GONE
    if isinstance(error, RankFailed):
        print(f"axonn: {error}", file=sys.stderr)
        return 1
    raise error


def _stop(number: int, frame: Any) -> NoReturn:
    global _stopped
    _stopped = True
    raise KeyboardInterrupt


def run() -> NoReturn:
    """The command: `main`, and the end of the process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    code = main()
    # All is done or undone: what Ctrl-C would interrupt is the interpreter's own end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "RANK" in os.environ:
        # A rank has said all: threads of its libraries, which may still run when the interpreter ends, must not abort it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
