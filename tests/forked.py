"""Commands in processes of their own that are forked from the test's, which saves the imports."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from axonn_plugins.cli import main


class Forked:
    """A command in a process of its own: as much of Popen as is needed here.

    Args:
        command: what stands behind ``axonn``.
        folder: where it works, if not in the test's: in a session of its own, its output in the file "output", its temporary
            files in the folder "tmp".

    Attributes:
        stdout: what it prints, on stderr, too, where it has no folder.
    """

    def __init__(self, command: Sequence[str], folder: Path | None = None) -> None:
        read, write = os.pipe()
        sys.stdout.flush()
        self.pid, self.returncode = os.fork(), 0
        if self.pid == 0:
            if folder is not None:
                write = _move(folder)
            _become(command, write)
        os.close(write)
        self.stdout = os.fdopen(read)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self) -> tuple[str]:
        with self.stdout:
            text = self.stdout.read()
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return (text,)

    def ended(self, seconds: float) -> bool:
        """True if it ends within so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)


def _move(folder: Path) -> int:
    os.setsid()
    (folder / "tmp").mkdir(parents=True)
    os.chdir(folder)
    os.environ["TMPDIR"], tempfile.tempdir = str(folder / "tmp"), None
    return os.open("output", os.O_WRONLY | os.O_CREAT)


def _become(command: Sequence[str], write: int) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor in (1, 2):
            os.dup2(write, descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.environ["OMP_NUM_THREADS"] = "1"
        code = main([*command])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
