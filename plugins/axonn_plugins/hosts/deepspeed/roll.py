"""The newest DeepSpeed configuration of each rank, for ranks that would wait for one whose configuration has no block.

Standard library only, as no configuration may hold one.
"""

from __future__ import annotations

import sys
import time
from itertools import count
from typing import Any

PATIENCE = 10.0
"""Seconds after which a rank that waits looks for those that will not come."""
_parsed = 0
_meetings = count()


def note(block: bool) -> None:
    """A configuration was parsed on this rank; `block`: with an ``"axonn"`` block."""
    global _parsed
    _parsed += 1
    store = _store()
    if store is not None:
        store.set(f"axonn/configuration/{_rank()}", f"{_parsed} {int(block)}")


def wait_for_all() -> list[int]:
    """Wait until every rank has come here as often as this one.

    Returns:
        The ranks that will not, as they have parsed as many configurations and their newest has no block; else none.
    """
    store = _store()
    if store is None:
        return []
    key, begun, nap = f"axonn/meeting/{next(_meetings)}", time.monotonic(), 0.001
    world = sys.modules["torch.distributed"].get_world_size()
    came = store.add(key, 1)
    while came < world:
        time.sleep(nap)
        nap = min(2 * nap, 0.05)
        came = store.add(key, 0)
        if time.monotonic() - begun > PATIENCE:
            begun = time.monotonic()
            absent = [rank for rank in range(world) if _is_without(store, rank)]
            if absent:
                return absent
    return []


def _is_without(store: Any, rank: int) -> bool:
    key = f"axonn/configuration/{rank}"
    if not store.check([key]):
        return False
    parsed, block = map(int, store.get(key).split())
    return not block and parsed >= _parsed


def _store() -> Any:
    """The job's; None where there is one rank, or no process group yet."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.distributed_c10d._get_default_store()


def _rank() -> int:
    return int(sys.modules["torch.distributed"].get_rank())
