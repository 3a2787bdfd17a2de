"""Whether Triton's kernels take a step or a compression, and the tables that they read.

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

from samo.store import Entry, Store
from samo.tiles import Piece, Tile

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@cache
def kernels() -> ModuleType | None:
    """`samo.kernels`, or None where triton is not installed."""
    return None if find_spec("triton") is None else import_module("samo.kernels")


def runs(tensor: Tensor) -> bool:
    """Whether kernels run on this tensor: on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1)."""
    interpreted = tensor.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return tensor.dtype in _DTYPES and (interpreted or tensor.device.type == "cuda") and kernels() is not None


def knows(inner: torch.optim.Optimizer) -> bool:
    """Whether the kernel does exactly what this optimizer does: torch's Adam or AdamW with plain options."""
    if type(inner) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    strange = ("amsgrad", "maximize", "capturable", "differentiable")
    return len({bool(group["fused"]) for group in inner.param_groups}) == 1 and not any(
        any(group[key] for key in strange) or any(isinstance(value, Tensor) for value in (group["lr"], *group["betas"]))
        for group in inner.param_groups
    )


def compress(entry: Entry, gradient: Tensor, store: Store) -> bool:
    """Put a flattened gradient's kept elements into the vector of compressed gradients, or add them; False: nothing done."""
    if not runs(store.gradient) or gradient.dtype != store.gradient.dtype:
        return False
    if entry.index is None:
        into = store.gradient[entry.start : entry.start + entry.kept]
        into.add_(gradient) if entry.arrived else into.copy_(gradient)
        return True
    with torch.cuda.device_of(gradient):
        kernels().compress(gradient, entry.index, store.gradient, entry.start, entry.arrived)  # type: ignore[union-attr]
    return True


def tile_size(inner: torch.optim.Optimizer, given: int, store: Store) -> int:
    """Elements of a tile: all of the store where the kernel steps, which needs no buffers, and few launches."""
    return max(store.owned, 1) if runs(store.gradient) and knows(inner) else given


def adam(inner: torch.optim.Optimizer, tile: Tile, factor: Tensor | None) -> bool:
    """Take the step of all pieces of a tile whose gradients have arrived; False: nothing done, torch has to."""
    if not runs(tile.store.gradient) or not knows(inner):
        return False
    if not isinstance(tile.plan, Plan):
        tile.plan = Plan(tile, inner)
    with torch.cuda.device_of(tile.store.gradient):
        tile.plan.step(inner, factor)
    return True


class Plan:
    """How one launch updates all pieces of a tile.

    The number of the step is each piece's own, as in torch; the tensors of `state["step"]` are views of one vector here, so
    that counting costs one call.

    Args:
        tile: which pieces.
        inner: torch's Adam or AdamW.
    """

    def __init__(self, tile: Tile, inner: torch.optim.Optimizer) -> None:
        module = kernels()
        assert module is not None
        self.kernels, self.tile = module, tile
        device = tile.store.gradient.device
        self.groups = [piece.segment.entry.group for piece in tile.pieces]
        rows = [
            module.split(piece.segment.entry.index, piece.segment.begin, piece.segment.length, device)
            for piece in tile.pieces
        ]
        number = torch.repeat_interleave(torch.tensor([row.shape[0] for row in rows])).to(device)
        self.work = torch.cat([number[:, None], torch.cat(rows)], 1)
        on = device if inner.param_groups[0]["fused"] else torch.device("cpu")
        self.steps = torch.zeros(len(rows), device=on)
        self.views = self.steps.unbind()
        self.one = torch.ones((), device=device)
        self._addresses: list[list[int]] = []
        self._table = torch.empty(0)

    def step(self, inner: torch.optim.Optimizer, factor: Tensor | None) -> None:
        """Update what has arrived."""
        store = self.tile.store
        pieces = self._pieces(inner)
        factor = self.one if factor is None else factor.to(self.one)
        self.kernels.adam(self.work, pieces, self._scalars(inner), store.gradient, store.master, factor)

    def _pieces(self, inner: torch.optim.Optimizer) -> Tensor:
        """The kernel's table of pieces, made anew if a tensor is another than in the last step."""
        rows = [
            self._row(piece, inner.state[piece.weights] if piece.segment.entry.arrived else {}, view)
            for piece, view in zip(self.tile.pieces, self.views, strict=True)
        ]
        if rows != self._addresses:
            self._addresses, self._table = rows, torch.tensor(rows).to(self.work.device)
        return self._table

    def _row(self, piece: Piece, state: dict[str, Any], count: Tensor) -> list[int]:
        segment, entry = piece.segment, piece.segment.entry
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
        return [entry.parameter.data_ptr(), *index, segment.begin, segment.gradient, segment.master, *averages]

    def _scalars(self, inner: torch.optim.Optimizer) -> Tensor:
        """Count the step, and compute as torch does, in float64, what is the same for all elements of a piece."""
        arrived = torch.tensor(
            [float(piece.segment.entry.arrived) for piece in self.tile.pieces], device=self.steps.device
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
