"""Count every collective that goes over the wire: calls, bytes and time by axis, forward, backward and step.

A profiler that runs meanwhile shows each collective, and each wait for one, by its axis.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from axonn_tp import Collective

FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "broadcast": "broadcast",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_parts": "reduce_scatter",
}
INPLACE = {
    "allreduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "allgather_single_": ("all_gather", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_single_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_coalesced_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
}


@dataclass
class Entry:
    """A collective that happened.

    Attributes:
        collective: which.
        itemsize: bytes of one element.
        started: seconds from the ledger's start to the call.
        ended: the same to the moment when its result was there for use.
        exposed: seconds of these in which this rank did nothing but wait; None where that cannot be seen: on a GPU, whose
            host does not wait, and for c10d's own calls (DeepSpeed's gradient sums), whose waits are not operators.
    """

    collective: Collective
    itemsize: int
    started: float = 0.0
    ended: float = 0.0
    exposed: float | None = None

    @property
    def name(self) -> str:
        """Operation and axis, as a trace shows them."""
        return f"{self.collective.op} {self.collective.axis}"

    @property
    def sent(self) -> Fraction:
        """Bytes that this rank sends under the ring algorithms."""
        return self.collective.sent * self.itemsize


class Ledger(TorchDispatchMode):
    """A context that records the collectives of this rank.

    Groups of one rank communicate nothing and are left out.

    Args:
        axes: axis by torch's name of its group, from `Mesh.axis_names`; other groups appear by torch's name.

    Attributes:
        entries: what happened, in order.
        unknown: names of c10d operators it saw and does not count.
    """

    def __init__(self, axes: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.axes = dict(axes or {})
        self.entries: list[Entry] = []
        self.unknown: set[str] = set()
        self._began = time.perf_counter()
        self._under_way: dict[int, Entry] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Record, and run."""
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            # They run local operations, collectives and waits, which come here again.
            return NotImplemented
        name = function._schema.name.split("::")
        kwargs = kwargs or {}
        if name[0] in ("_c10d_functional", "axonn"):
            return self._functional(name[1].rstrip("_"), function, args, kwargs)
        if name[0] != "c10d":
            return function(*args, **kwargs)
        before, now = len(self.entries), self._now()
        self._in_place(name[1], args)
        with self._named(before):
            result = function(*args, **kwargs)
        for entry in self.entries[before:]:
            entry.started, entry.ended = now, self._now()
        return result

    def _named(self, before: int) -> AbstractContextManager:
        """A span of the profiler for the collective that was noted last, if one was."""
        return record_function(self.entries[-1].name) if len(self.entries) > before else nullcontext()

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _functional(self, name: str, function: Any, args: tuple, kwargs: dict) -> Any:
        now = self._now()
        if name == "wait_tensor":
            entry = self._under_way.pop(args[0].untyped_storage().data_ptr(), None)
            if entry is None:
                return function(*args, **kwargs)
            with record_function(f"wait {entry.name}"):
                result = function(*args, **kwargs)
                entry.ended = self._now()
                entry.exposed = None if args[0].is_cuda else (entry.exposed or 0.0) + entry.ended - now
            return result
        before = len(self.entries)
        if name in FUNCTIONAL:
            group = _resolve_process_group(args[-1])
            # What a rank keeps of an uneven exchange is not in its tensor.
            uneven = name == "all_to_all_single" and len(set(args[2])) > 1 and not args[2][group.rank()]
            for tensor in flat(args[0]):
                self._record("exchange" if uneven else FUNCTIONAL[name], args[-1], group.size(), tensor)
        elif name != "_wrap_tensor_autograd":  # which communicates nothing
            self.unknown.add(name)
        with self._named(before):
            result = function(*args, **kwargs)
        for entry, made in zip(self.entries[before:], flat(result), strict=False):
            entry.started, entry.ended, entry.exposed = now, self._now(), self._now() - now
            self._under_way[made.untyped_storage().data_ptr()] = entry
        return result

    def _in_place(self, name: str, args: tuple) -> None:
        if name not in INPLACE:
            if name not in ("barrier",):
                self.unknown.add(name)
            return
        op, position = INPLACE[name]
        boxed = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
        group = dist.ProcessGroup.unbox(boxed)
        payload = args[position]
        calls = [payload] if name == "alltoall_" or isinstance(payload, Tensor) else payload
        for call in calls:
            self._record(op, group.group_name, group.size(), *flat(call))

    def _record(self, op: str, group: str, size: int, *tensors: Tensor) -> None:
        """One call, of a tensor or of a list of all ranks' parts."""
        if size > 1:
            collective = Collective(op, self.axes.get(group, group), size, sum(tensor.numel() for tensor in tensors))
            self.entries.append(Entry(collective, tensors[0].element_size()))

    @property
    def collectives(self) -> list[Collective]:
        """The collectives that happened, without element sizes."""
        return [entry.collective for entry in self.entries]

    def exposed_by_axis(self) -> dict[str, float]:
        """Seconds that this rank waited, by axis, where that can be seen."""
        totals: dict[str, float] = defaultdict(float)
        for entry in self.entries:
            if entry.exposed is not None:
                totals[entry.collective.axis] += entry.exposed
        return dict(totals)

    def by_axis(self) -> dict[str, tuple[int, Fraction]]:
        """Calls and bytes sent by this rank, by axis."""
        totals: dict[str, tuple[int, Fraction]] = defaultdict(lambda: (0, Fraction(0)))
        for entry in self.entries:
            calls, sent = totals[entry.collective.axis]
            totals[entry.collective.axis] = (calls + 1, sent + entry.sent)
        return dict(totals)


def flat(payload: Any) -> list[Tensor]:
    """The tensors of an argument of c10d's, which may be lists of lists."""
    if isinstance(payload, Tensor):
        return [payload]
    return [tensor for part in payload for tensor in flat(part)]
