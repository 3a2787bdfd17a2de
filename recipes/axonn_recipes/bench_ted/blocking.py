"""Time in collectives by kind, with nothing else in it."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from axonn_plugins.observe.ledger import Entry, Ledger

KINDS = ("all-to-all", "all-reduce", "all-gather", "reduce-scatter", "gradients")


def kind_of(entry: Entry) -> str:
    """The part of Figure 7.5 that a collective belongs to; sums of gradients, which it does not show, are apart."""
    op, axis = entry.collective.op, entry.collective.axis
    return "gradients" if op == "all_reduce" and axis != "tensor" else op.replace("_", "-")


class Blocking(Ledger):
    """A ledger in which all ranks meet before each collective and wait until it is done.

    So what an entry was waited for (`exposed`) is the collective alone: no lateness of another rank is in it, and no
    computation hides it. All ranks must call the same collectives in the same order.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Meet, run and wait."""
        space, name = function._schema.name.split("::")
        if space not in ("c10d", "_c10d_functional") or name in ("wait_tensor", "barrier"):
            return super().__torch_dispatch__(function, types, args, kwargs)
        before = len(self.entries)
        dist.barrier()
        began = time.perf_counter()
        result = super().__torch_dispatch__(function, types, args, kwargs)
        for part in tree_leaves(result):
            if isinstance(part, torch.ScriptObject):
                dist.Work.unbox(part).wait()
            elif space == "_c10d_functional":
                torch.ops._c10d_functional.wait_tensor(part)
        for entry in self.entries[before:]:
            entry.exposed = time.perf_counter() - began
        return result

    def seconds(self) -> dict[str, float]:
        """Seconds in collectives by kind."""
        totals = dict.fromkeys(KINDS, 0.0)
        for entry in self.entries:
            totals[kind_of(entry)] += entry.exposed or 0.0
        return totals


def counted(ledger: Ledger) -> tuple[dict[str, int], dict[str, int]]:
    """Calls, and bytes that this rank sends, by kind."""
    calls: dict[str, int] = defaultdict(int)
    sent: dict[str, int] = defaultdict(int)
    for entry in ledger.entries:
        calls[kind_of(entry)] += 1
        sent[kind_of(entry)] += int(entry.sent)
    return dict(calls), dict(sent)
