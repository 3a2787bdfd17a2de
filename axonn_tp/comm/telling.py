"""Words that ranks tell one another by way of the store: no collective, and nobody waits for anybody."""

from __future__ import annotations

from collections import Counter
from weakref import WeakKeyDictionary

import torch.distributed as dist

_MOST = 16
"""Ranks of a group that tell and hear, so that what is asked of the store grows with the ranks alone."""
_subjects: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()


class Telling:
    """One thing that the first ranks of a group tell now and then, and hear from each other as soon as all of them have told it.

    Args:
        group: the ranks; a stand-in for ranks that are not there, torch's "fake", tells nothing.
        subject: in words; of several with the same words the first that is told on one rank is the first on all.

    Attributes:
        ranks: that tell, by their numbers in the job; none on a rank that is not among them.
    """

    def __init__(self, group: dist.ProcessGroup, subject: str) -> None:
        self._group, self._subject = group, subject
        tells = group.rank() < _MOST and dist.get_backend(group) != "fake"
        self.ranks = dist.get_process_group_ranks(group)[:_MOST] if tells else []
        self._said = 0
        self._open: list[str] = []

    def tell(self, said: str) -> None:
        """Tell the others; what not all have told yet of the time before is passed over."""
        if not self.ranks:
            return
        if not self._said:
            subjects = _subjects.setdefault(self._group, Counter())
            subjects[self._subject] += 1
            self._subject += f" {subjects[self._subject]}"
        self._said += 1
        keys = [f"axonn {self._subject} {self._said} of {rank}" for rank in range(len(self.ranks))]
        self._store().set(keys[self._group.rank()], said)
        self._open = keys

    def heard(self) -> list[str] | None:
        """Words of all in the order of `ranks`, once; None where not all have told theirs."""
        if not self._open or not self._store().check(self._open):
            return None
        keys, self._open = self._open, []
        store = self._store()
        many = store.has_extended_api()  # type: ignore[attr-defined]
        told = store.multi_get(keys) if many else [store.get(key) for key in keys]
        return [one.decode() for one in told]

    def _store(self) -> dist.Store:
        return dist.distributed_c10d._get_process_group_store(self._group)
