"""The choice of Triton's kernels for a step or a compression, and the tables that they read.

Triton is optional. Where it is missing, on a CPU, and for an optimizer or option that the kernels do not know, the torch
version does the work. State is kept where torch's optimizer keeps it, under its names, so the two can take turns.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from axonn_plugins.optim.store import Entry, Segment, Store

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
    """One launch that updates all segments of a store, with its table of work and counts of steps.

    The number of the step is each segment's own, as in torch; the tensors of `state["step"]` are views of one vector here, so
    that counting costs one call.

    Args:
        store: whose segments.
        inner: torch's Adam or AdamW.
    """

    def __init__(self, store: Store, inner: torch.optim.Optimizer) -> None:
        module = kernels()
        assert module is not None
        self.kernels, self.store = module, store
        self.groups = [segment.entry.group for segment in store.segments]
        rows = [
            module.split(segment.entry.index, segment.begin, segment.length, store.device) for segment in store.segments
        ]
        number = torch.repeat_interleave(torch.tensor([row.shape[0] for row in rows])).to(store.device)
        self.work = torch.cat([number[:, None], torch.cat(rows)], 1)
        on = store.device if inner.param_groups[0]["fused"] else torch.device("cpu")
        self.steps = torch.zeros(len(rows), device=on)
        self.views = self.steps.unbind()
        self.one = torch.ones((), device=store.device)
        self._addresses: list[list[int]] = []
        self._table = torch.empty(0)

    def step(self, inner: torch.optim.Optimizer, factor: Tensor | None) -> None:
        """Update what has arrived."""
        pieces = self._pieces(inner)
        factor = self.one if factor is None else factor.to(self.one)
        self.kernels.adam(self.work, pieces, self._scalars(inner), self.store.gradient, self.store.master, factor)

    def _pieces(self, inner: torch.optim.Optimizer) -> Tensor:
        """The kernel's table of segments, made anew if a tensor is another than in the last step."""
        rows = [
            self._row(segment, inner.state[segment.weights] if segment.entry.arrived else {}, view)
            for segment, view in zip(self.store.segments, self.views, strict=True)
        ]
        if rows != self._addresses:
            self._addresses, self._table = rows, torch.tensor(rows).to(self.work.device)
        return self._table

    def _row(self, segment: Segment, state: dict[str, Any], count: Tensor) -> list[int]:
        entry = segment.entry
        if not entry.arrived:
            return [0] * len(self.kernels.PIECE)
        if not state:
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros(segment.length, device=self.work.device)
            count.zero_()
            state["step"] = count
        elif state["step"] is not count:
            state["step"] = count.copy_(torch.as_tensor(state["step"]))
        index = (0, 0) if entry.index is None else _stored(entry.index.tensors[0])
        averages = state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr()
        return [entry.parameter.data_ptr(), *index, segment.begin, segment.gradient, segment.owned, *averages]

    def _scalars(self, inner: torch.optim.Optimizer) -> Tensor:
        """Count the step, and compute as torch does, in float64, what is the same for all elements of a segment."""
        arrived = torch.tensor(
            [float(segment.entry.arrived) for segment in self.store.segments], device=self.steps.device
        )
        self.steps += arrived
        by_group = torch.tensor(
            [_numbers(group, isinstance(inner, torch.optim.AdamW)) for group in inner.param_groups], dtype=torch.float64
        )
        lr, beta1, beta2, *given = by_group[self.groups].to(self.steps.device).unbind(1)
        step = self.steps.double()
        step_size, root = lr / (1 - beta1**step), (1 - beta2**step).sqrt()
        decay, coupled, eps = given
        columns = [arrived.double(), decay, coupled, 1 - beta1, beta2, 1 - beta2, root, eps, step_size]
        return torch.stack(columns, 1).float().to(self.work.device)


def _stored(offsets: Tensor) -> tuple[int, int]:
    return offsets.data_ptr(), offsets.element_size()


def _numbers(group: dict[str, Any], decoupled: bool) -> tuple[float, ...]:
    """Learning rate, betas, the factor of decoupled weight decay, coupled weight decay, epsilon."""
    lr, decay = group["lr"], group["weight_decay"]
    decoupled = decoupled or group.get("decoupled_weight_decay", False)
    return lr, *group["betas"], 1 - lr * decay if decoupled else 1.0, 0.0 if decoupled else decay, group["eps"]
