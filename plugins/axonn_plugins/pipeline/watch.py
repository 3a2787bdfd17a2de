"""Which stage was lost, found out by the others through the run's store, so that all of them name the same one."""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from axonn_plugins.pccl.answering import Answering
from axonn_plugins.pipeline.links import StageLost, in_vain
from axonn_tp.grid.timeouts import world_timeout

_LISTEN_SECONDS, _YIELD_SECONDS, _ANSWER_SECONDS = 1.0, 3.0, 10.0
# Gloo's errors are plain RuntimeErrors.
_OF_LINKS = ("gloo", "connection", "socket", "nccl", "pccl", "by peer", "timed out", "remote worker", "pair closure")


class Watch:
    """The view of one stage; used by one thread, beside which another listens until `close`.

    Args:
        name: of the run's engine, the same on all ranks.
        pipelines: global ranks of every pipeline of the world, by stage.
    """

    def __init__(self, name: str, pipelines: Sequence[Sequence[int]]) -> None:
        store = dist.PrefixStore(f"axonn/pipeline/{name}", dist.distributed_c10d._get_default_store())
        self._store = Answering(store, world_timeout().total_seconds(), whose="")
        self.ranks = next(list(ranks) for ranks in pipelines if dist.get_rank() in ranks)
        self.stage = self.ranks.index(dist.get_rank())
        self._stages = {rank: stage for ranks in pipelines for stage, rank in enumerate(ranks)}
        self._waits = False
        self._awaited: list[int] = []
        self._heard: str | None = None
        self._began = math.inf  # of the collectives that run
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="axonn-pipeline-watch", daemon=True)
        self._thread.start()
        # A thread that comes back from the store when the interpreter is gone would abort the process.
        atexit.register(self.close)

    def _listen(self) -> None:
        """Answer for this rank, which may be computing, and hear what others find while their store is there."""
        rank = dist.get_rank()
        with suppress(RuntimeError):  # the store is gone
            while not self._closed.wait(_LISTEN_SECONDS):
                if self._store.check(["asked"]):
                    self._store.set(f"alive/{rank}", "")
                if self._store.check(["asked where"]) and time.monotonic() - self._began > _LISTEN_SECONDS:
                    self._store.set(f"collective/{rank}", "")
                if self._heard is None:
                    self._hear()

    def _hear(self) -> None:
        if self._heard is None and self._store.check(["lost"]):
            self._heard = self._store.get("lost").decode().split(maxsplit=1)[1]
            self._store.set(f"heard/{dist.get_rank()}", "")

    @contextmanager
    def collectives(self) -> Iterator[None]:
        """Around collectives: an error of one that another rank has left says which.

        Raises:
            StageLost: in its place; or before them, where a rank has left that they would wait for.
        """
        if self._heard is not None:
            self._leave()
            raise StageLost(self.stage, self._heard, agreed=True)
        self._began = time.monotonic()
        try:
            yield
        except StageLost:
            raise
        except RuntimeError as error:
            found = self._missing(error) if _of_a_link(error) else None
            if found is None:
                raise
            raise found from None
        finally:
            self._began = math.inf

    def _missing(self, error: RuntimeError) -> StageLost | None:
        """For a collective that failed: which ranks are gone, be they its own or those for which its own left; None: all answer."""
        why = f"a collective of stage {self.stage} failed: {error}"
        try:
            gone = self._silent("asked", "alive")
            if not gone and in_vain(error):
                # Whoever waits in a collective for a rank that is still there is not the one that is lost.
                gone = self._silent("asked where", "collective")
            if not gone:
                return None
            return self._agreed(gone, why)
        except StageLost as named:
            self._leave()
            return StageLost(self.stage, f"{named}; {why}", agreed=True)
        except RuntimeError:
            return self._without_store(why)

    def _silent(self, question: str, answer: str) -> list[int]:
        """The ranks that do not answer a question.

        Raises:
            StageLost: another rank says which is lost.
        """
        self._store.set(question, "")
        self._store.set(f"{answer}/{dist.get_rank()}", "")
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline:
            self._refuse_if_lost()
            time.sleep(0.05)
        return [rank for rank in range(dist.get_world_size()) if not self._store.check([f"{answer}/{rank}"])]

    def close(self) -> None:
        """The engine ends, and its thread with it."""
        self._closed.set()
        self._thread.join(_LISTEN_SECONDS)
        atexit.unregister(self.close)

    def waiting(self, stages: Sequence[int]) -> None:
        """Called now and then while this stage waits for others; tells them.

        Raises:
            StageLost: another stage has found that one is lost.
        """
        try:
            self._refuse_if_lost()
            if not self._waits:
                self._waits, self._awaited = True, list(stages)
                self._store.set(self._waits_key(self.stage), " ".join(str(stage) for stage in stages))
        except StageLost:
            raise
        except RuntimeError as error:
            raise self._without_store(str(error)) from None

    def working(self) -> None:
        """This stage goes on."""
        if self._waits:
            self._waits = False
            with suppress(RuntimeError):  # the next wait will find that the store is gone
                self._store.set(self._waits_key(self.stage), "")

    def lost(self, error: StageLost) -> StageLost:
        """The same error under the name of the stage that is at its root, as the first stage that noticed has it.

        On rank 0 it returns when all other ranks have heard, or after some seconds: the store may end with this process.
        """
        if error.agreed:
            self._leave()
            return error
        try:
            if error.in_vain:
                stage = self._root([error.stage, *self._awaited])
            else:
                # A library may have closed the link because the other stage waited in vain for a third, which it will say.
                stage = error.stage
                self._yield()
            return self._agreed([self.ranks[stage]], str(error))
        except RuntimeError:
            return self._without_store(str(error))

    def failed(self, error: Exception) -> None:
        """Tell the others, which would wait for it, that this stage ends its batch with an error of its own."""
        words = f"ended its batch with {type(error).__name__}: {error}"
        with suppress(RuntimeError):  # the store is gone, and the others hear that
            self._agreed([self.ranks[self.stage]], words, "")

    def _agreed(self, gone: Sequence[int], why: str, lost: str = "was lost; ") -> StageLost:
        """The ranks that were first said to be lost, by whichever rank."""
        places = ", ".join(f"stage {self._stages[rank]} (rank {rank})" for rank in gone)
        said = self._store.compare_set("lost", "", f"{gone[0]} {places} of the pipeline {lost}{why}").decode()
        self._leave()
        return StageLost(self.stage, said.split(maxsplit=1)[1], agreed=True)

    def _yield(self) -> None:
        deadline = time.monotonic() + _YIELD_SECONDS
        while time.monotonic() < deadline and not self._store.check(["lost"]):
            time.sleep(0.05)

    def _leave(self) -> None:
        """Rank 0, with which the store may end, leaves when the others have heard; the one that is lost has not."""
        with suppress(RuntimeError):
            self._hear()
            if dist.get_rank() != 0:
                return
            gone = int(self._store.get("lost").decode().split(maxsplit=1)[0])
            others = [rank for rank in range(dist.get_world_size()) if rank != gone]
            deadline = time.monotonic() + _ANSWER_SECONDS
            while time.monotonic() < deadline and not self._store.check([f"heard/{rank}" for rank in others]):
                time.sleep(0.05)

    def _refuse_if_lost(self) -> None:
        self._hear()
        if self._heard is not None:
            raise StageLost(self.stage, self._heard, agreed=True)

    def _root(self, open_: list[int]) -> int:
        """Follow from stage to stage what each waits for, to one that does not."""
        seen, first = {self.stage}, open_[0]
        while open_:
            stage = open_.pop(0)
            if stage in seen:
                continue
            seen.add(stage)
            waited = self._waited(stage)
            if not waited:
                return stage
            open_ += waited
        return first

    def _waited(self, stage: int) -> list[int]:
        key = self._waits_key(stage)
        if not self._store.check([key]):
            return []
        self._store.wait([key], timedelta(seconds=_YIELD_SECONDS))
        return [int(word) for word in self._store.get(key).decode().split()]

    def _waits_key(self, stage: int) -> str:
        return f"waits/{self.ranks[stage]}"

    def _without_store(self, why: str) -> StageLost:
        words = self._heard or (
            f"the run's store, which is usually with rank 0 (stage 0 of the first pipeline), was lost; stage {self.stage} cannot go on"
        )
        return StageLost(self.stage, f"{words}; {why}", agreed=True)


def _of_a_link(error: RuntimeError) -> bool:
    words = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in words for word in _OF_LINKS)
