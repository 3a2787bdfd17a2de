"""Stand-ins for all ranks but one: a process group whose collectives return at once, and a store that counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from axonn_tp import Grid
from axonn_tp.checkpoint import ranks as checkpointing


def grid_of(ranks: int) -> Grid:
    """The grid that is measured on a power of two of ranks: x is a node's eight, and z, data and y share the rest.

    Raises:
        ValueError: no power of two, or fewer than eight.
    """
    power = ranks.bit_length() - 1
    if ranks != 1 << power or power < 3:
        raise ValueError(f"{ranks} ranks are not a power of two of at least 8; give one")
    rest = power - 3
    y = min(rest // 4, 3)
    z = (rest - y + 1) // 2
    return Grid(8, 1 << y, 1 << z, 1 << (rest - y - z))


def places(ranks: int) -> list[int]:
    """The ranks that are measured: the first, the one in the middle and the last."""
    return sorted({0, ranks // 2, ranks - 1})


@contextmanager
def one_of(ranks: int, rank: int) -> Iterator[None]:
    """Be one of so many ranks; collectives leave what they were given, as if all others had given the same."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    world = dist.group.WORLD
    assert world is not None
    # A checkpoint's group is gloo's, which would wait for the others.
    checkpointing._groups[world] = world
    try:
        yield
    finally:
        checkpointing._groups.clear()
        dist.destroy_process_group()


class CountingStore(dist.Store):
    """A store in this process that counts what a rank asks of it.

    Attributes:
        written: keys set.
        asked: keys read.
        calls: requests, each a message to the store's server and back.
        received: bytes read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self.written = self.asked = self.calls = self.received = 0

    def forget_counts(self) -> None:
        """Count from 0 again."""
        self.written = self.asked = self.calls = self.received = 0

    def set(self, key: str, value: Any) -> None:  # noqa: D102
        self.written, self.calls = self.written + 1, self.calls + 1
        self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:  # noqa: D102
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:  # noqa: D102
        found = [self.values[key] for key in keys]
        self.asked, self.calls = self.asked + len(keys), self.calls + 1
        self.received += sum(map(len, found))
        return found

    def add(self, key: str, amount: int) -> int:  # noqa: D102
        self.written, self.calls = self.written + 1, self.calls + 1
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def check(self, keys: Sequence[str]) -> bool:  # noqa: D102
        return all(key in self.values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: D102
        assert self.check(keys)

    def delete_key(self, key: str) -> bool:  # noqa: D102
        self.calls += 1
        return self.values.pop(key, None) is not None

    def set_timeout(self, timeout: timedelta) -> None:  # noqa: D102
        pass

    def has_extended_api(self) -> bool:  # noqa: D102
        return True
