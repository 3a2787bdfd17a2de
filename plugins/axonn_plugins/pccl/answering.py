"""A store whose calls come to an end, also where the process that serves it is stopped."""

from __future__ import annotations

import _thread
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

from axonn_plugins.pccl.links import LinkError


class Answering:
    """A store that is given up when it does not answer: torch's client waits for its server for ever, as timeouts are the server's.

    Its calls raise a LinkError where it does not answer, or has gone.

    Args:
        store: torch's.
        seconds: that a call may take.
        whose: what errors begin with.

    Attributes:
        store: the same.
    """

    def __init__(self, store: dist.Store, seconds: float, whose: str = "pccl: ") -> None:
        self.store, self.seconds, self.whose, self._silent = store, seconds, whose, False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.store, name)
        if isinstance(found, dist.Store):
            return Answering(found, self.seconds, self.whose)
        return partial(self._ask, found) if callable(found) else found

    def _ask(self, call: Any, *arguments: Any) -> Any:
        answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def ask() -> None:
            try:
                answers.put((call(*arguments), None))
            except BaseException as error:
                answers.put((None, error))

        try:
            if self._silent:
                raise Empty
            _thread.start_new_thread(ask, ())  # threading's own waits until it runs, as long as the call takes
            answer, failed = answers.get(timeout=self.seconds)
        except Empty:
            self._silent = True
            raise LinkError(
                f"{self.whose}the store where the ranks of the group meet does not answer; who holds it, as a rule rank 0 of the job, is held up"
            ) from None
        if isinstance(failed, dist.DistNetworkError):
            raise LinkError(
                f"{self.whose}the store where the ranks of the group meet has gone; who holds it, as a rule rank 0 of the job, has ended"
            ) from failed
        if failed is not None:
            raise failed
        return answer
