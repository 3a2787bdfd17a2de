"""Ranks that must call something together, and are told so when one of them calls it alone."""

from __future__ import annotations

import time
from weakref import WeakKeyDictionary

import torch.distributed as dist

SECONDS = 30.0
"""Seconds that a rank waits for the others before it says that they do not come."""
_LONGEST_NAP = 0.05
_calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def meet(group: dist.ProcessGroup, what: str, advice: str) -> None:
    """Return once all ranks of a group have called this for the same, so that a collective after it cannot wait for ever.

    Args:
        group: the ranks.
        what: what they do, as a sentence's subject.
        advice: how to do it in another way, as a sentence's last part.

    Raises:
        ValueError: on every rank that calls, where another one does not.
    """
    store = dist.distributed_c10d._get_process_group_store(group)
    # Meetings that others gave up before this rank came are over: those ranks will be at the next one.
    while True:
        number = _calls[group] = _calls.get(group, 0) + 1
        arrived, verdict = (f"axonn meeting {number} {word}" for word in ("arrived", "verdict"))
        if not store.check([verdict]):
            break
    deadline, nap = time.monotonic() + SECONDS, 0.001
    if store.compare_set(f"{arrived} for", "", what) != what.encode():
        store.compare_set(verdict, "", "not all")
    if store.add(arrived, 1) == group.size():
        store.compare_set(verdict, "", "all")
    while not store.check([verdict]):
        if time.monotonic() > deadline:
            store.compare_set(verdict, "", "not all")
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP)
    if store.get(verdict) != b"all":
        raise ValueError(
            f"{what} takes all {group.size()} ranks that hold shards of it, and they did not all come within {SECONDS:.0f} s; call it on every "
            f"rank, not under `if rank == 0`, and write the file on one; {advice}"
        )
