"""The choice of Triton's kernels for a step or a compression, and the tables that they read.

Triton is optional. Where it is missing, on a CPU, and for an optimizer or option that the kernels do not know, the torch
version does the work. State is kept where torch's optimizer keeps it, under its names, so the two can take turns.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from itertools import compress as selected
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from axonn_plugins.optim.store import Entry, Segment, Store

_OF_STATE = operator.itemgetter("step", "exp_avg", "exp_avg_sq")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@cache
def kernels() -> ModuleType | None:
    """`samo.kernels`, or None where triton is not installed."""
    return None if find_spec("triton") is None else import_module("samo.kernels")


def runs(tensor: Tensor) -> bool:
    """True if kernels run on this tensor: on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1)."""
    interpreted = tensor.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return tensor.dtype in _DTYPES and (interpreted or tensor.device.type == "cuda") and kernels() is not None


def knows(inner: torch.optim.Optimizer) -> bool:
    """True if the kernel does exactly what this optimizer does: torch's Adam or AdamW with plain options."""
    if type(inner) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    strange = ("amsgrad", "maximize", "capturable", "differentiable")
    return len({bool(group["fused"]) for group in inner.param_groups}) == 1 and not any(
        any(group[key] for key in strange) or any(isinstance(value, Tensor) for value in (group["lr"], *group["betas"]))
        for group in inner.param_groups
    )


def compress(entry: Entry, gradient: Tensor, into: Tensor) -> bool:
    """Put a flattened gradient's kept elements into `into`, or add them; False: nothing done."""
    if not runs(into) or gradient.dtype != into.dtype:
        return False
    if entry.index is None:
        into.add_(gradient) if entry.filled else into.copy_(gradient)
        return True
    with torch.cuda.device_of(gradient):
        kernels().compress(gradient, entry.index, into, 0, entry.filled)  # type: ignore[union-attr]
    return True


def adam(inner: torch.optim.Optimizer, store: Store, plans: dict[Store, Plan], factor: Tensor | None) -> bool:
    """Take the step of all segments of a store whose gradients have arrived; False: nothing done, torch has to.

    Args:
        inner: torch's optimizer.
        store: with state on its device.
        plans: what is kept of stores from step to step.
        factor: by which gradients are multiplied; None: by nothing.
    """
    alike = store.gradient.dtype == store.dtype
    if store.host or not alike or not store.segments or not runs(store.gradient) or not knows(inner):
        return False
    if store not in plans:
        plans[store] = Plan(store, inner)
    with torch.cuda.device_of(store.gradient):
        plans[store].step(inner, factor)
    return True


class Plan:
    """One launch that updates all segments of a store, with its tables.

    The number of the step is each segment's own, as in torch; the tensors of `state["step"]` are views of one vector here, so
    that counting costs one call. The host counts along, so that it computes a step's numbers without asking the device. A step in which
    nothing has moved costs the host some calls in all, not some a segment.

    Args:
        store: whose segments.
        inner: torch's Adam or AdamW.
    """

    def __init__(self, store: Store, inner: torch.optim.Optimizer) -> None:
        module = kernels()
        assert module is not None
        self.kernels, self.store = module, store
        self.entries = [segment.entry for segment in store.segments]
        rows = [
            module.split(segment.entry.index, segment.begin, segment.length, store.device) for segment in store.segments
        ]
        number = torch.repeat_interleave(torch.tensor([row.shape[0] for row in rows])).to(store.device)
        self.work = torch.cat([number[:, None], torch.cat(rows)], 1)
        on = store.device if inner.param_groups[0]["fused"] else torch.device("cpu")
        self.steps = torch.zeros(len(rows), device=on)
        self.views = self.steps.unbind()
        self.one = torch.ones((), device=store.device)
        self._counts: list[float] = []
        self._version = -1
        self._arrived: list[bool] = []
        self._used: list[dict[str, Any]] = []
        self._states: list[dict[str, Any]] = []
        self._addresses: list[int] = []
        self._rows: dict[tuple[int, float], int] = {}
        self._pieces = self._added = torch.empty(0)

    def step(self, inner: torch.optim.Optimizer, factor: Tensor | None) -> None:
        """Update what has arrived."""
        arrived = [entry.arrived for entry in self.entries]
        if not self._as_before(inner, arrived):
            self._look(inner, arrived)
        self.steps += self._added
        self._version = self.steps._version
        self._counts = [count + one for count, one in zip(self._counts, arrived, strict=True)]
        self._rows = {(group, count + 1): row for (group, count), row in self._rows.items()}
        decoupled = isinstance(inner, torch.optim.AdamW)
        scalars = [_scalars(inner.param_groups[group], decoupled, count) for group, count in self._rows]
        table = torch.tensor(scalars, dtype=torch.float32).to(self.work.device)
        factor = self.one if factor is None else factor.to(self.one)
        self.kernels.adam(self.work, self._pieces, table, self.store.gradient, self.store.master, factor)

    def _as_before(self, inner: torch.optim.Optimizer, arrived: list[bool]) -> bool:
        """True if the same segments have gradients as in the last step, and their tensors are where they were, unchanged but by it."""
        return (
            arrived == self._arrived
            and self.steps._version == self._version
            and len(inner.state) == len(self._states)
            and all(map(operator.is_, inner.state.values(), self._states))
            and self._found() == self._addresses
        )

    def _found(self) -> list[int]:
        """Addresses of parameters and states of the segments that have gradients."""
        tensors = chain.from_iterable(map(_OF_STATE, self._used))
        return [*map(Tensor.data_ptr, self._parameters()), *map(Tensor.data_ptr, tensors)]

    def _parameters(self) -> Iterable[Tensor]:
        return (entry.parameter for entry in selected(self.entries, self._arrived))

    def _look(self, inner: torch.optim.Optimizer, arrived: list[bool]) -> None:
        """Make the kernel's table of segments, and take counts that somebody else has written."""
        self._arrived = arrived
        self._used = [
            self._state(segment, inner, view)
            for segment, view in zip(self.store.segments, self.views, strict=True)
            if segment.entry.arrived
        ]
        self._states, self._addresses = list(inner.state.values()), self._found()
        if self.steps._version != self._version:
            self._counts = self.steps.tolist()
        keys = [(entry.group, count) for entry, count in zip(self.entries, self._counts, strict=True)]
        self._rows = {key: row for row, key in enumerate(dict.fromkeys(selected(keys, arrived)))}
        states = iter(self._used)
        pieces = [
            _piece(segment, next(states), self._rows[key]) if segment.entry.arrived else self.kernels.NOTHING
            for segment, key in zip(self.store.segments, keys, strict=True)
        ]
        self._pieces = torch.tensor(pieces).to(self.work.device)
        self._added = torch.tensor(arrived).to(self.steps)

    def _state(self, segment: Segment, inner: torch.optim.Optimizer, count: Tensor) -> dict[str, Any]:
        state = inner.state[segment.weights]
        if not state:
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros(segment.length, device=self.work.device)
            count.zero_()
            state["step"] = count
        elif state["step"] is not count:
            state["step"] = count.copy_(torch.as_tensor(state["step"]))
        return state


def _piece(segment: Segment, state: dict[str, Any], row: int) -> tuple[int, ...]:
    """A row of the kernel's table of segments."""
    entry = segment.entry
    index = None if entry.index is None else entry.index.tensors[0]
    stored = (0, 0) if index is None else (index.data_ptr(), index.element_size())
    addresses = entry.parameter.data_ptr(), state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr()
    return row, *stored, segment.begin, segment.gradient, segment.owned, *addresses


def _scalars(group: dict[str, Any], decoupled: bool, step: float) -> tuple[float, ...]:
    """A row of the kernel's table of numbers, computed as torch does, in float64."""
    lr, (beta1, beta2), weight_decay = group["lr"], group["betas"], group["weight_decay"]
    decoupled = decoupled or group.get("decoupled_weight_decay", False)
    decay, coupled = (1 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)
    root, step_size = math.sqrt(1 - beta2**step), lr / (1 - beta1**step)
    return decay, coupled, 1 - beta1, beta2, 1 - beta2, root, group["eps"], step_size
