"""The command itself, whatever it is asked."""

from __future__ import annotations

import os
import subprocess
import sys


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "axonn_plugins.cli", "schema"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert done.returncode == 141 and done.stderr == ""
