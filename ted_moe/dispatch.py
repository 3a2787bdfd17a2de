"""Tokens to their experts and back, without what tensor ranks hold twice (000, section 7.3.1).

The collectives that `axonn_tp.comm.collectives` has are used from there; these are the ones that only experts need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from axonn_tp.comm.collectives import gather_from, wait
from axonn_tp.comm.stalls import explained
from axonn_tp.grid.mesh import Axes
from ted_moe.agreement import begin_backward
from ted_moe.gating import Routes

_ops = torch.ops._c10d_functional


def _begun(tensor: Tensor, groups: Axes, sent: list[int], received: list[int]) -> Tensor:
    with explained(groups.group("expert")):
        return _ops.all_to_all_single(tensor, received, sent, groups.group("expert").group_name)


def _arrived(tensor: Tensor, groups: Axes) -> Tensor:
    with explained(groups.group("expert")):
        return wait(tensor)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, groups: Axes, sent: list[int], received: list[int]) -> Tensor:
        ctx.arguments = (groups, received, sent)
        return _arrived(_begun(tensor.contiguous(), groups, sent, received), groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        begin_backward(ctx.arguments[0])
        return exchange(grad, *ctx.arguments), None, None, None


def exchange(tensor: Tensor, groups: Axes, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
    """All-to-all over the expert ranks: slice i of dim 0 goes to rank i, and slice j of the result came from rank j.

    Args:
        tensor: any shape.
        groups: the axes.
        sent: sizes of the slices, by rank; equal ones when None.
        received: the same of the result.
    """
    size = groups.size("expert")
    if size == 1:
        return tensor
    equal = [tensor.shape[0] // size] * size
    return _AllToAll.apply(tensor, groups, sent or equal, received or equal)


class _Transfer:
    """An all-to-all under way, and in backward that of its gradient.

    Attributes:
        tensor: what is on its way; None: nothing is.
    """

    def __init__(self, groups: Axes, sent: list[int], received: list[int]) -> None:
        self.groups, self.sent, self.received = groups, sent, received
        self.tensor: Tensor | None = None
        self._given: Tensor | None = None

    def start(self, tensor: Tensor, back: bool = False) -> None:
        """Begin; `back`: what was received is sent."""
        sizes = (self.received, self.sent) if back else (self.sent, self.received)
        self._given = tensor.contiguous()  # lives until it is sent
        self.tensor = _begun(self._given, self.groups, *sizes)

    def take(self) -> Tensor:
        """Return the tensor that has come."""
        arriving, self.tensor = self.tensor, None
        assert arriving is not None
        arrived = _arrived(arriving, self.groups)
        self._given = None
        return arrived


class _Start(torch.autograd.Function):
    """Begins an all-to-all, and in backward waits for the gradient's; its result stands in for what is not there yet."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.start(tensor)
        return tensor.new_zeros(()).expand(tensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad if ctx.transfer.tensor is None else ctx.transfer.take(), None


class _Arrive(torch.autograd.Function):
    """Waits for an all-to-all, and in backward begins the gradient's."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer, ctx.shape = transfer, stand_in.shape
        return transfer.take()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        transfer = ctx.transfer
        begin_backward(transfer.groups)
        if torch.is_grad_enabled():  # this backward is differentiated
            return exchange(grad, transfer.groups, transfer.received, transfer.sent), None
        transfer.start(grad, back=True)
        return grad.new_zeros(()).expand(ctx.shape), None


def start_exchange(
    tensor: Tensor, groups: Axes, sent: list[int] | None = None, received: list[int] | None = None
) -> Callable[[], Tensor]:
    """Begin an `exchange`; what is returned waits for it, and is called once. In backward its place is where the gradient's begins."""
    size = groups.size("expert")
    if size == 1:
        return lambda: tensor
    equal = [tensor.shape[0] // size] * size
    transfer = _Transfer(groups, sent or equal, received or equal)
    stand_in = _Start.apply(tensor, transfer)
    return lambda: _Arrive.apply(stand_in, transfer)


def exchange_in_turn(
    slices: Sequence[Tensor],
    work: Callable[[int, Tensor], Tensor],
    groups: Axes,
    sent: Sequence[list[int] | None],
    received: Sequence[list[int] | None],
) -> list[Tensor]:
    """Exchange slices, work on each, and exchange the results back: while one is worked on, the next comes and the last one's results go.

    At most one slice is on its way in each direction, else the first would arrive as late as all. The order of starting and waiting, read
    backwards, is the same, so backward, which autograd runs in that order, overlaps alike.

    Args:
        slices: each any shape; the slices of dim 0 go to the ranks.
        work: makes of slice i, as it came, what goes back.
        groups: the axes.
        sent: see `exchange`, of each slice.
        received: likewise.
    """
    if len(slices) == 1:
        came = work(0, exchange(slices[0], groups, sent[0], received[0]))
        return [exchange(came, groups, received[0], sent[0])]
    back: list[Tensor] = []
    leaving: Callable[[], Tensor] | None = None
    coming = start_exchange(slices[0], groups, sent[0], received[0])
    for number in range(len(slices)):
        here = coming()
        if number + 1 < len(slices):
            coming = start_exchange(slices[number + 1], groups, sent[number + 1], received[number + 1])
        done = work(number, here)
        if leaving is not None:
            back.append(leaving())
        leaving = start_exchange(done, groups, received[number], sent[number])
    assert leaving is not None
    return [*back, leaving()]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, sources: Tensor, groups: Axes, drop: bool, full: bool) -> Tensor:
        ctx.save_for_backward(sources)
        ctx.groups, ctx.drop, ctx.full, ctx.count = groups, drop, full, tokens.shape[0]
        if drop:
            sources = sources.chunk(groups.size("tensor"))[groups.rank("tensor")]
        return (tokens if full else _with_zeros(tokens)).index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (sources,) = ctx.saved_tensors
        if ctx.drop:
            grad = gather_from(grad, ctx.groups, "tensor", 0)
        total = grad.new_zeros(ctx.count + (not ctx.full), grad.shape[1])
        total.index_add_(0, sources, grad)
        return total[: ctx.count], None, None, None, None


def _with_zeros(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])


def dispatch(tokens: Tensor, slots: Tensor, count: int, groups: Axes, drop: bool, full: bool = False) -> Tensor:
    """Put tokens into slots.

    Args:
        tokens: S × M, the same on all tensor ranks.
        slots: k × S; a token may be in several; `count`: in none.
        count: of slots, C.
        groups: the axes.
        drop: take this tensor rank's share of the slots only; the gradient is gathered over the tensor ranks.
        full: a token is routed to every slot.

    Returns:
        C × M, or C/G_tensor × M; zeros in slots that nothing is routed to.
    """
    sources = torch.full((count + 1,), tokens.shape[0], dtype=torch.long, device=tokens.device)
    numbers = torch.arange(tokens.shape[0], device=tokens.device).expand_as(slots)
    sources.scatter_(0, slots.reshape(-1), numbers.reshape(-1))
    return _Dispatch.apply(tokens, sources[:-1], groups, drop, full)


def as_trained(outputs: Tensor, trained: bool) -> Tensor:
    """The outputs of experts, which backward comes to on every rank where any rank's experts are `trained`: it exchanges on all ranks or on none.

    Without that a rank whose own experts are frozen, or had no tokens, would keep others' from the gradients of its tokens.
    """
    return (
        outputs.detach().requires_grad_()
        if trained and not outputs.requires_grad and torch.is_grad_enabled()
        else outputs
    )


def combine(outputs: Tensor, slots: Tensor, weights: Tensor, full: bool = False) -> Tensor:
    """The experts' outputs for each token, weighted.

    Args:
        outputs: (..., M), what is in each slot.
        slots: k × S; beyond the last: in none.
        weights: k × S.
        full: every route has a slot.

    Returns:
        S × M.
    """
    features = outputs.shape[-1]
    rows = outputs.reshape(-1, features)
    rows = rows if full else _with_zeros(rows)
    routed = rows.index_select(0, slots.reshape(-1)).view(*slots.shape, features)
    return (routed * weights.unsqueeze(-1)).sum(0).to(outputs.dtype)


def slots_of(routes: Routes, experts: int, capacity: int, shares: int) -> Tensor:
    """Each route's slot among all experts', k × S; one beyond the last where the expert had no room.

    They are numbered share by share of the tensor ranks, and in these expert by expert: so what is gathered from the tensor
    ranks lies in this order, and need not be rearranged.
    """
    each = max(capacity // shares, 1)  # there may be no tokens at all
    slots = (routes.places // each * experts + routes.experts) * each + routes.places % each
    return torch.where(routes.experts >= 0, slots, experts * capacity)
