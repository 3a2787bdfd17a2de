"""A rank ends in the middle of random calls; all others are told, and go on in a new group.

``python -m tests.pccl.kills ROUNDS [SEED]``
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from axonn_plugins.cluster.launch import free_port
from axonn_plugins.pccl.build import load
from tests.pccl.stress import Pending, finish, join, one

TIMEOUT = 10.0
"""Seconds, of the groups."""
ENDS = ("killed", "killed", "stopped", "stays away", "leaves", "exits")
"""kill -9; SIGSTOP; makes no more calls; destroys its groups and lives; ends by itself."""


def victim_ends(end: str, groups: list[Any], pending: list[Pending]) -> None:
    """On the rank that ends, from one call to the next."""
    if end == "exits":
        os._exit(0)
    if end == "leaves":
        pending.clear()
        groups.clear()
        dist.destroy_process_group()
    time.sleep(1000)


def play(rank: int, size: int, ports: tuple[int, int], victim: int, end: str, seed: int, pipe: Connection) -> None:
    """One rank's part of a round; the victim ends after some calls, or is ended from without."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]))
    join(timeout=TIMEOUT)
    draw, order = random.Random(seed), random.Random(seed + rank)
    chosen = [sorted({victim, *draw.sample(range(size), draw.randint(1, size - 1))}) for _ in range(2)]
    members = [list(range(size)), *chosen]
    groups = [dist.new_group(some, timeout=timedelta(seconds=TIMEOUT)) for some in members]
    last = draw.randint(5, 60)
    pipe.send("runs")
    pending: list[Pending] = []
    texts: list[str] = []
    when, number = 0.0, 0
    try:
        dist.barrier()
        while True:
            which, here = draw.randrange(len(groups)), random.Random(seed * 1_000_003 + number)
            number += 1
            if rank == victim and number > last and not end == "killed":
                pipe.send(time.time())
                victim_ends(end, groups, pending)
            if rank not in members[which]:
                continue
            pending.append(one(here, groups[which], 1000 * number))
            if len(pending) >= 10:
                for _ in range(order.randint(1, 10)):
                    finish(pending.pop(order.randrange(len(pending))))
    except RuntimeError as error:
        texts.append(str(error))
        when = time.time()
    for item in pending:
        try:
            finish(item)
        except RuntimeError as error:
            texts.append(str(error))
    pipe.send((when, texts))
    pending.clear()
    groups.clear()
    dist.destroy_process_group()
    others = [other for other in range(size) if other != victim]
    store = dist.TCPStore("127.0.0.1", ports[1], is_master=rank == others[0], wait_for_workers=False)
    dist.init_process_group(
        "pccl", store=store, rank=others.index(rank), world_size=len(others), timeout=timedelta(seconds=30)
    )
    again = torch.full((40_000,), float(rank))
    dist.all_reduce(again)
    assert again.eq(sum(others)).all()
    dist.barrier()
    pipe.send("anew")
    os._exit(0)


def round_of(draw: random.Random, end: str | None = None, size: int | None = None) -> tuple[list[str], float]:
    """Faults of one round, and the seconds until the last rank was told."""
    size, end, seed = size or draw.randint(3, 8), end or draw.choice(ENDS), draw.randrange(10**6)
    victim = draw.randrange(size)
    ports = free_port(), free_port()
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in range(size)]
    ranks = [
        fork.Process(target=play, args=(rank, size, ports, victim, end, seed, pipes[rank][1])) for rank in range(size)
    ]
    wrong, slowest = [], 0.0
    what = f"{end}: rank {victim} of {size}, seed {seed}"
    try:
        for process in ranks:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        if not all(pipe.poll(60) and pipe.recv() == "runs" for pipe, _ in pipes):
            return [f"{what}: does not start"], 0.0
        ended = time.time()
        if end == "killed":
            time.sleep(draw.random() * 0.6)
            ended = time.time()
            os.kill(ranks[victim].pid or 0, signal.SIGKILL)
        else:
            with suppress(EOFError):
                ended = pipes[victim][0].recv() if pipes[victim][0].poll(30) else ended
            if end == "stopped":
                os.kill(ranks[victim].pid or 0, signal.SIGSTOP)
        for rank in set(range(size)) - {victim}:
            try:
                if not pipes[rank][0].poll(4 * TIMEOUT):
                    wrong.append(f"{what}: rank {rank} hangs")
                    continue
                when, texts = pipes[rank][0].recv()
                slowest = max(slowest, when - ended)
                limit = TIMEOUT + 5 if end in ("stopped", "stays away") else 5
                if when - ended > limit:
                    wrong.append(f"{what}: rank {rank} hears of it after {when - ended:.1f} s: {texts[0]}")
                if f"rank {victim}" not in texts[0]:
                    wrong.append(f"{what}: rank {rank} is told {texts[0]}")
            except EOFError:
                wrong.append(f"{what}: rank {rank} ended")
        for rank in set(range(size)) - {victim}:
            with suppress(EOFError):
                if pipes[rank][0].poll(40) and pipes[rank][0].recv() == "anew":
                    continue
            wrong.append(f"{what}: rank {rank} has no new group")
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return wrong, slowest


def main(rounds: int, seed: int = 1) -> None:
    """Rounds of random ends."""
    warnings.filterwarnings("ignore")
    load()
    draw, bad, slowest = random.Random(seed), 0, {end: 0.0 for end in ENDS}
    for number in range(rounds):
        end = draw.choice(ENDS)
        wrong, seconds = round_of(draw, end)
        slowest[end] = max(slowest[end], seconds)
        bad += bool(wrong)
        for line in wrong:
            print(f"round {number}: {line}", flush=True)
    told = ", ".join(f"{end} {seconds:.1f}" for end, seconds in slowest.items())
    print(f"{rounds} rounds, {bad} bad; slowest to be told, in seconds: {told}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
