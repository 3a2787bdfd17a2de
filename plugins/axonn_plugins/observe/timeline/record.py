"""The watch on one rank for a step: when each operator, each collective and each wait began and ended."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from axonn_plugins.observe.ledger import FUNCTIONAL, INPLACE, flat
from axonn_tp import Collective

Key = tuple[str, int]
"""A collective: torch's name of its group, and the how manyth of the group it is; the same on all of its ranks."""
_OTHERS = {
    "barrier": "barrier",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
_STARTERS = (
    "allreduce allreduce_coalesced broadcast reduce allgather _allgather_base allgather_coalesced allgather_into_tensor_coalesced "
    "reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced alltoall alltoall_base gather scatter barrier send recv "
    "all_gather_single all_gather_single_coalesced reduce_scatter_single reduce_scatter_single_coalesced all_to_all_single recv_anysource"
).split()
_PROBES = 300


@dataclass
class Call:
    """A collective that was begun.

    Attributes:
        key: which.
        op: what it does.
        axis: of its group.
        ranks: in the group.
        began: nanoseconds of the clock.
        added: bytes that this rank adds up in it, or its backend does for it.
        dtype: of these.
    """

    key: Key
    op: str
    axis: str
    ranks: int
    began: int
    added: int
    dtype: torch.dtype


@dataclass
class Span:
    """A while that this rank spent in one thing.

    Attributes:
        kind: "compute", "adding", "call" (beginning a collective) or "wait" (for one).
        began: nanoseconds of the clock.
        ended: likewise.
        worked: nanoseconds of the thread's processor time when it began, and when it ended.
        call: the collective.
    """

    kind: str
    began: int
    ended: int
    worked: tuple[int, int]
    call: Call | None = None


class Recorder(TorchDispatchMode):
    """A watch on the thread that begins it, of which operators and waits tell when they begin and end.

    Args:
        axes: axis by torch's name of its group, from `Mesh.axis_names`; other groups appear as torch describes or names them.

    Attributes:
        spans: what was done, in order; no two overlap, and what lies between them is Python.
        calls: collectives that were begun.
        began: nanoseconds of the clock at the beginning, and of the thread.
        ended: the same at the end.
    """

    def __init__(self, axes: dict[str, str] | None = None) -> None:
        super().__init__()
        self.axes = axes or {}
        self.spans: list[Span] = []
        self.calls: list[Call] = []
        self.began = self.ended = (0, 0)
        self._numbers: Counter[str] = Counter()
        self._under_way: dict[int, Call] = {}
        self._works: dict[int, tuple[Any, Call]] = {}
        self._parts: set[int] = set()
        self._last: Call | None = None
        self._thread = 0
        self._entered = False
        self._inside = False  # of an operator or wait, whose time all is that it calls
        self._below: list[Any] = []
        self._originals: list[tuple[Any, str, Any]] = []

    def begin(self) -> None:
        """Watch from now on."""
        self.start_clock()
        self.enter()

    def start_clock(self) -> None:
        """Time counts from now on; what is done is seen from `enter` on."""
        self._thread = threading.get_ident()
        self._replace(dist.Work, "wait", self._watched_wait)
        for name in _STARTERS:
            self._replace(dist.ProcessGroup, name, self._remembered)
        self.began = _now()

    def enter(self) -> None:
        """See operators; harmless when called again."""
        if not self._entered:
            self._entered = True
            self._below = _get_current_dispatch_mode_stack()[-1:]
            self.__enter__()

    def end(self) -> None:
        """Stop, whichever modes have come since and stay, or have left."""
        self.ended = _now()
        stack = _get_current_dispatch_mode_stack()
        if self in stack:
            later = [_pop_mode() for _ in stack[stack.index(self) + 1 :]]
            self.__exit__(None, None, None)
            for mode in reversed(later):
                _push_mode(mode)
        elif self._below and stack[-1:] == self._below:
            _pop_mode()  # it was there before, and as it left took the watch, which lay above it
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        self._originals.clear()
        self._under_way.clear()
        self._works.clear()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run, and note when."""
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            # They run local operations and collectives, which come here again.
            return NotImplemented
        kwargs = kwargs or {}
        space, _, name = function._schema.name.partition("::")
        if threading.get_ident() != self._thread or self._inside:
            return function(*args, **kwargs)
        call, kind = None, "compute"
        if space in ("_c10d_functional", "axonn", "c10d"):
            call, kind = self._communicates(space, name, args)
        elif self._parts and name.startswith("sum") and args[0].untyped_storage().data_ptr() in self._parts:
            self._parts.discard(args[0].untyped_storage().data_ptr())
            kind = "adding"
        began, ran = _now()
        if call is not None and kind == "call":
            call.began = began
        self._inside = True
        try:
            result = function(*args, **kwargs)
        finally:
            self._inside = False
        ended, stopped = _now()
        self.spans.append(Span(kind, began, ended, (ran, stopped), call))
        if call is not None and kind == "call" and isinstance(result, Tensor):
            self._under_way[result.untyped_storage().data_ptr()] = call
            if name == "reduce_scatter_parts":
                self._parts.add(result.untyped_storage().data_ptr())
        return result

    def _communicates(self, space: str, name: str, args: tuple) -> tuple[Call | None, str]:
        if name == "wait_tensor":
            call = self._under_way.pop(args[0].untyped_storage().data_ptr(), None)
            return call, "compute" if call is None else "wait"
        if space != "c10d":
            op = FUNCTIONAL.get(name.rstrip("_"))
            if op is None:
                return None, "compute"
            return self._call(op, _resolve_process_group(args[-1]), [args[0]], name != "reduce_scatter_parts"), "call"
        op, place = INPLACE.get(name, (_OTHERS.get(name), 0))
        if op is None:
            return None, "compute"
        boxed = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
        self._last = self._call(op, dist.ProcessGroup.unbox(boxed), flat(args[place]), op != "barrier")
        if op in ("send", "recv"):
            ends = (dist.ProcessGroup.unbox(boxed).rank(), "any" if name == "recv_any_source_" else args[2])
            self._last.key = self._next(f"{self._last.key[0]} {ends if op == 'send' else ends[::-1]}")
        return self._last, "call"

    def _next(self, name: str) -> Key:
        self._numbers[name] += 1
        return name, self._numbers[name]

    def _call(self, op: str, group: dist.ProcessGroup, tensors: list[Tensor], adds: bool) -> Call:
        name = group.group_name
        # Of messages between two not all ranks of the group have equally many.
        key = (name, 0) if op in ("send", "recv") else self._next(name)
        added = 0
        if adds and op in ("reduce_scatter", "all_reduce", "reduce"):
            share = Collective("reduce_scatter", "", group.size(), sum(tensor.numel() for tensor in tensors))
            added = int(share.sent * tensors[0].element_size())
        dtype = tensors[0].dtype if tensors else torch.uint8
        self.calls.append(Call(key, op, self.axes.get(name) or _described(group), group.size(), 0, added, dtype))
        return self.calls[-1]

    def _replace(self, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
        if name in vars(owner):
            self._originals.append((owner, name, vars(owner)[name]))  # as it stands there, which binds to its object
            setattr(owner, name, change(getattr(owner, name)))

    def _remembered(self, start: Any) -> Any:
        """A method that begins a collective, of which it is remembered which one it began."""

        @wraps(start)
        def started(*args: Any, **named: Any) -> Any:
            self._last = None
            work = start(*args, **named)
            if self._last is not None:
                self._works[id(work)] = (work, self._last)
            return work

        return started

    def _watched_wait(self, wait: Any) -> Any:
        @wraps(wait)
        def waited(work: Any, *args: Any, **named: Any) -> Any:
            if threading.get_ident() != self._thread or self._inside:
                return wait(work, *args, **named)
            _, call = self._works.pop(id(work), (None, None))
            began, ran = _now()
            self._inside = True
            try:
                result = wait(work, *args, **named)
            finally:
                self._inside = False
            ended, stopped = _now()
            self.spans.append(Span("wait", began, ended, (ran, stopped), call))
            return result

        return waited


def _described(group: dist.ProcessGroup) -> str:
    said = {"default_pg": "all", "undefined": group.group_name, "": group.group_name}
    return said.get(group.group_desc, group.group_desc.removeprefix("mesh_"))


def _now() -> tuple[int, int]:
    """Nanoseconds of the machine's clock, which its processes share, and of this thread's processor time."""
    return time.perf_counter_ns(), time.thread_time_ns()


def cost_of_watching() -> float:
    """Nanoseconds that a watched operator takes longer than another: the least of many."""
    tensor = torch.zeros(1)

    def least() -> int:
        took = []
        for _ in range(_PROBES):
            began = time.perf_counter_ns()
            tensor.view(-1)
            took.append(time.perf_counter_ns() - began)
        return min(took)

    plain, watch = least(), Recorder()
    watch.begin()
    watched = least()
    watch.end()
    inside = min(span.ended - span.began for span in watch.spans)
    return max(0, watched - plain - max(0, inside - plain))


def nanoseconds_to_add(dtype: torch.dtype) -> float:
    """Nanoseconds that adding up a byte takes here: the least of many sums of two buffers."""
    size = 2**18 // dtype.itemsize
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    one, other = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
    took = []
    for _ in range(20):
        began = time.perf_counter_ns()
        one.add_(other)
        took.append(time.perf_counter_ns() - began)
    return min(took) / 2**18
