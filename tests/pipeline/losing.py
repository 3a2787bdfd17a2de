"""Ranks of which one is killed and the others are left to notice, which `axonn_plugins.cluster.launch` would not."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from axonn_plugins.cluster.launch import free_port


def survivors(
    function: Callable[..., str], ranks: int, variants: Sequence[tuple] = ((),), timeout: float = 150
) -> list[dict[int, str]]:
    """Results of ranks of a gloo group, by rank; those that did not end in time are left out and killed.

    The function's variants, each with arguments of its own, run at the same time, for most of theirs is waiting.
    """
    fork = multiprocessing.get_context("fork")
    queues, processes = [fork.SimpleQueue() for _ in variants], []
    sys.stdout.flush()
    for said, arguments in zip(queues, variants, strict=True):
        port = free_port()
        processes += [
            fork.Process(target=_rank, args=(said, rank, ranks, port, timeout, function, arguments))
            for rank in range(ranks)
        ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and not all(_ended(process) for process in processes):
        time.sleep(0.05)
    for process in processes:
        process.kill()
        process.join()
    found: list[dict[int, str]] = [{} for _ in queues]
    for words, said in zip(found, queues, strict=True):
        while not said.empty():
            words.update([said.get()])
    return found


def _ended(process: Any) -> bool:
    """True if a child has ended, or is stopped."""
    if not process.is_alive():
        return True
    with suppress(FileNotFoundError):
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return True


def _rank(
    said: Any, rank: int, ranks: int, port: int, timeout: float, function: Callable[..., str], arguments: tuple
) -> None:
    faulthandler.dump_traceback_later(timeout - 5, file=sys.__stderr__)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        words = function(*arguments)
    except BaseException as error:
        words = f"{type(error).__name__}: {error}"
    said.put((rank, words))
    os._exit(0)


def stop_or_kill(kind: str) -> None:
    """End this process, or let it hang."""
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
