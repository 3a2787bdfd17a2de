"""Ctrl-C: a command ends within seconds with one line and 130, and leaves no process, node, temporary file or half a result."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import tests.deepspeed.training  # noqa: F401  without a kernel that takes a minute to compile
from axonn_plugins.cluster import lacking, processes
from tests.forked import Forked

SMALL = ["--layers", "2", "--heads", "4", "--hidden", "32", "--context", "16", "--batch", "8"]
STARTS_IN, ENDS_IN = 120.0, 20.0
"""Seconds within which a busy machine comes to the point, and within which it ends what takes one."""

Command = tuple[list[str], Callable[["Watched"], bool], bool]
"""What stands behind ``axonn``, a look whether it is time, and whether all of its processes get the signal, as from a
terminal, or its first alone."""


class Watched(Forked):
    """A command in a folder of its own."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.folder = folder
        super().__init__(words, folder)

    @property
    def said(self) -> str:
        output = self.folder / "output"
        return output.read_text() if output.exists() else ""

    def session(self) -> Iterator[int]:
        """Its processes that run, but for a cluster's switch."""
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            try:
                state, *_, session = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(session) == self.pid and state not in "ZX":
                yield int(entry)

    def clusters(self) -> list[str]:
        """Names of its clusters."""
        return [switch.name for switch in processes.running() if switch.owner == self.pid]

    def left(self) -> list[str]:
        """Files of its own, but for its output."""
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())


COMMANDS: dict[str, Command] = {
    "quickstart": (["train", "quickstart", "--steps", "100000", *SMALL], lambda one: "\nstep " in one.said, True),
    "validation": (
        ["train", "validation", "--size", "small", "--model", "gpt", "--steps", "100000"],
        lambda one: len([*one.session()]) > 1,
        False,
    ),
    "bench": (
        ["bench", "tp", *SMALL, "--nodes", "2", "--ranks-per-node", "1", "--latency", "50ms", "--grids", "1,1,2"],
        lambda one: len([*one.session()]) > 2 and bool(one.clusters()),
        True,
    ),
    "test gpu": (
        ["test", "gpu", "--dry", "--ranks", "2", "--report", "found"],
        lambda one: len([*one.folder.glob("tmp/axonn-gpu-*/output.txt")]) == 2,
        True,
    ),
}


def until(seen: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not seen():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_commands_end_and_leave_nothing(tmp_path: Path) -> None:
    names = [name for name in COMMANDS if name != "bench" or lacking() is None]
    started = {name: Watched(COMMANDS[name][0], tmp_path / name.replace(" ", "-")) for name in names}
    for name, one in started.items():
        _, ready, whole = COMMANDS[name]
        assert until(lambda one=one, ready=ready: ready(one), STARTS_IN), (name, one.said)
        (os.killpg if whole else os.kill)(one.pid, signal.SIGINT)
    for name, one in started.items():
        assert one.ended(ENDS_IN), (name, one.said)
        assert one.returncode == 130, (name, one.said)
        assert until(lambda one=one: not [*one.session()] and not one.clusters(), 5.0), name
        assert "Traceback" not in one.said, one.said
        if name != "quickstart":
            assert one.said.endswith("\naxonn: interrupted\n"), one.said
            reports = {"found.json", "found.md"}  # of the systems that had ended
            assert set(one.left()) - (reports if name == "test gpu" else set()) == {"output"}, one.left()
    run = tmp_path / "quickstart" / "runs" / "quickstart"
    (saved,) = (run / "checkpoints").glob("step_*")
    assert f"stopped after step {int(saved.name.removeprefix('step_'))}" in started["quickstart"].said
