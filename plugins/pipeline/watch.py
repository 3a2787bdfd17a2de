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

from plugins.pipeline.transport import StageLost

_ANSWER_SECONDS, _LAST_LOOK_SECONDS, _LISTEN_SECONDS = 3.0, 0.5, 1.0
# Gloo's errors are plain RuntimeErrors.
_OF_LINKS = ("gloo", "connection", "socket", "nccl", "pccl", "by peer", "timed out", "remote worker", "pair closure")


class Watch:
    """The view of one stage; used by one thread, beside which another listens until `close`.

    Args:
        name: of the run's engine, the same on all ranks.
        stage: this one.
        ranks: of this pipeline, by stage.
    """

    def __init__(self, name: str, stage: int, ranks: Sequence[int]) -> None:
        self._store = dist.PrefixStore(f"axonn/pipeline/{name}", dist.distributed_c10d._get_default_store())
        self.stage, self.ranks = stage, list(ranks)
        self._waits = False
        self._awaited: list[int] = []
        self._heard: StageLost | None = None
        self._began = math.inf  # of the collectives that run
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="axonn-pipeline-watch", daemon=True)
        self._thread.start()
        # A thread that comes back from the store when the interpreter is gone would abort the process.
        atexit.register(self.close)

    @contextmanager
    def collectives(self) -> Iterator[None]:
        """Around collectives: an error of one that another rank has left says which.

        Raises:
            StageLost: in its place.
        """
        try:
            with self._heard_of():
                yield
        except StageLost:
            raise
        except RuntimeError as error:
            found = self._missing(error)
            if found is error:
                raise
            raise found from None

    @contextmanager
    def _heard_of(self) -> Iterator[None]:
        """While collectives run, the listener speaks for this rank."""
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = math.inf

    def _listen(self) -> None:
        """A collective may wait for a rank that leaves for another's sake, and the store with it: hear of it before."""
        with suppress(RuntimeError):  # the store is gone
            while not self._closed.wait(_LISTEN_SECONDS):
                if self._store.check(["asked"]):
                    self._store.set(self._alive_key(dist.get_rank()), "")
                if time.monotonic() - self._began > _LISTEN_SECONDS:
                    self._hear()
                    if self._store.check(["wrong"]):
                        # Whoever waits in a collective for a rank that is still there is not the one that is lost.
                        self._store.set(self._here_key(dist.get_rank()), "")

    def _hear(self) -> None:
        try:
            self._refuse_if_lost()
        except StageLost as error:
            self._heard = error

    @contextmanager
    def together(self, ranks: Sequence[int]) -> Iterator[None]:
        """Around what ranks of this stage compute together: an error that one of them has left says which.

        Raises:
            StageLost: in its place; give it to `lost`.
        """
        try:
            with self._heard_of():
                yield
        except StageLost:
            raise
        except RuntimeError as error:
            if not _of_a_link(error):
                raise
            words = f"a collective of stage {self.stage} failed: {error}"
            try:
                silent = self._silent(ranks)
            except StageLost:
                raise
            except RuntimeError:
                raise StageLost(self.stage, words) from None  # the store is gone, which `lost` will say
            if not silent:
                raise
            raise StageLost(self.stage, words, rank=silent[0]) from None

    def _silent(self, ranks: Sequence[int]) -> list[int]:
        """The ranks of which no thread answers.

        Raises:
            StageLost: another rank says which is lost.
        """
        self._store.set("asked", "")
        self._store.set(self._here_key(dist.get_rank()), "")
        deadline = time.monotonic() + 2 * _ANSWER_SECONDS
        while time.monotonic() < deadline:
            self._refuse_if_lost()
            time.sleep(0.05)
        return [rank for rank in ranks if not self._store.check([self._alive_key(rank)])]

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
        self._refuse_if_lost()
        if not self._waits:
            self._waits, self._awaited = True, list(stages)
            self._store.set(self._waits_key(self.stage), " ".join(str(stage) for stage in stages))

    def working(self) -> None:
        """This stage goes on."""
        if self._waits:
            self._waits = False
            self._store.set(self._waits_key(self.stage), "")

    def lost(self, error: StageLost) -> StageLost:
        """The same error under the name of the stage that is at its root, as the first stage that noticed has it.

        On rank 0 it returns when all other ranks have noticed, or after some seconds: the store may end with this process.
        """
        try:
            if error.in_vain:
                stage = self._root([error.stage, *self._awaited])
            elif error.rank is not None:
                stage = error.stage
            else:
                # A library may have closed the link because the other stage waited in vain for a third, which it will say.
                stage = error.stage
                self._give_time()
            gone = self.ranks[stage] if error.rank is None else error.rank
            mine = f"{gone} stage {stage} (rank {gone}) of the pipeline was lost; {error}"
            rank, words = self._store.compare_set("lost", "", mine).decode().split(maxsplit=1)
        except RuntimeError:
            return StageLost(error.stage, f"{self._store_lost()}; {error}")
        # A rank with the store that has seen all the others may be the first to go.
        with suppress(RuntimeError):
            self._absent({int(rank)})
        return StageLost(error.stage, words)

    def _give_time(self) -> None:
        deadline = time.monotonic() + _LISTEN_SECONDS
        while time.monotonic() < deadline and not self._store.check(["lost"]):
            time.sleep(0.05)

    def _missing(self, error: RuntimeError) -> RuntimeError:
        """For a collective that failed: which ranks no longer answer; other errors come back as they are."""
        if not _of_a_link(error):
            return error
        try:
            self._refuse_if_lost()
            gone = self._absent(set())
            names = ", ".join(
                f"stage {self.ranks.index(r)} (rank {r})" if r in self.ranks else f"rank {r}" for r in gone
            )
            if gone:
                self._store.compare_set("lost", "", f"{gone[0]} {names} was lost")
        except StageLost as named:
            with suppress(RuntimeError):
                self._absent({self.ranks[self.stage]})
            return StageLost(self.stage, f"{named}; a collective of stage {self.stage} failed: {error}")
        except RuntimeError:
            return StageLost(
                0, f"{self._heard or self._store_lost()}; a collective of stage {self.stage} failed: {error}"
            )
        if not gone:
            return error
        return StageLost(self.stage, f"{names} was lost; a collective of stage {self.stage} failed: {error}")

    def _absent(self, known: set[int]) -> list[int]:
        """Tell the others that something is wrong here, and wait for them; returns the ranks that have not told.

        Raises:
            StageLost: another rank says which is lost, and none is `known` to be.
        """
        self._store.set("wrong", "")
        self._store.set(self._here_key(dist.get_rank()), "")
        # Some notice only when others have left, so these leave at once; the store may be rank 0's, which leaves last.
        patience = 2 * _ANSWER_SECONDS if dist.get_rank() == 0 else 0.0 if known else _ANSWER_SECONDS
        deadline = time.monotonic() + patience
        absent = list(range(dist.get_world_size()))
        while True:
            if not known:
                self._refuse_if_lost()
            absent = [rank for rank in absent if not self._store.check([self._here_key(rank)])]
            if not set(absent) - known or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if dist.get_rank() == 0:
            time.sleep(_LAST_LOOK_SECONDS)  # the others have yet to read what they waited for
        return absent

    def _refuse_if_lost(self) -> None:
        if self._store.check(["lost"]):
            raise StageLost(self.stage, self._store.get("lost").decode().split(maxsplit=1)[1])

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
        self._store.wait([key], timedelta(seconds=_ANSWER_SECONDS))
        return [int(word) for word in self._store.get(key).decode().split()]

    def _waits_key(self, stage: int) -> str:
        return f"waits/{self.ranks[stage]}"

    def _alive_key(self, rank: int) -> str:
        return f"alive/{rank}"

    def _here_key(self, rank: int) -> str:
        return f"here/{rank}"

    def _store_lost(self) -> str:
        return f"the run's store, which is usually with rank 0 (stage 0 of the first pipeline), was lost; stage {self.stage} cannot go on"


def _of_a_link(error: RuntimeError) -> bool:
    words = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in words for word in _OF_LINKS)
