"""Words that ranks tell one another by way of the store: no collective, and nobody waits for anybody."""

from __future__ import annotations

from collections import Counter
from weakref import WeakKeyDictionary

import torch.distributed as dist

_subjects: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()


class Telling:
    """One thing that each rank of a group tells now and then, and hears from the others as soon as all have told it.

    Args:
        group: the ranks.
        subject: in words; of several with the same words the first that is told on one rank is the first on all.
    """

    def __init__(self, group: dist.ProcessGroup, subject: str) -> None:
        self._group, self._subject = group, subject
        self._said = 0
        self._open: list[str] = []

    def tell(self, said: str) -> None:
        """Tell the others; what not all have told yet of the time before is passed over."""
        if not self._said:
            subjects = _subjects.setdefault(self._group, Counter())
            subjects[self._subject] += 1
            self._subject += f" {subjects[self._subject]}"
        self._said += 1
        keys = [f"axonn {self._subject} {self._said} of {rank}" for rank in range(self._group.size())]
        self._store().set(keys[self._group.rank()], said)
        self._open = keys

    def heard(self) -> list[str] | None:
        """Words of all, once, by rank in the group; None where not all have told theirs."""
        if not self._open or not self._store().check(self._open):
            return None
        keys, self._open = self._open, []
        return [self._store().get(key).decode() for key in keys]

    def _store(self) -> dist.Store:
        return dist.distributed_c10d._get_process_group_store(self._group)
