"""Saves in the background."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable


class Saving:
    """A save in the background. Wait for it before the process group is destroyed."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._failure: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, args=(write,), name="axonn checkpoint")
        self._thread.start()
        _running.append(self)

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._failure = error

    @property
    def done(self) -> bool:
        """True once the work has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is complete.

        Raises:
            CheckpointError: it could not be written.
        """
        self._thread.join()
        self._told = True
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Wait, and raise only what nobody has been told."""
        self._thread.join()
        if not self._told:
            self.wait()


_running: list[Saving] = []


@atexit.register
def _tell() -> None:
    """Say which save has failed where nobody has waited for it."""
    for saving in _running:
        if saving._failure is not None and not saving._told:
            print(f"axonn: a save in the background has failed: {saving._failure}", file=sys.stderr, flush=True)


def let_saving_end() -> None:
    """Call before the checkpoints' group is used: a save in the background would mix its messages with others.

    Raises:
        CheckpointError: the save failed, and nobody has waited for it.
    """
    while _running:
        _running.pop().finish()
