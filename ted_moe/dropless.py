"""Tokens to their experts and back by uneven all-to-alls: no expert has a capacity, so nothing is dropped and nothing padded.

A row is a token on its way to one expert. A rank sorts its rows by expert and tells every expert rank how many come to it.
T tensor ranks have the same rows; rank t sends those whose number is t modulo T, so all send as many, up to one row, and so
nearly every expert rank receives from them. Where experts are split over the tensor ranks, these then gather what each of them
received, padded to the longest: a few rows, at most one for each expert rank, and what comes back, padded by one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from axonn_tp.comm.collectives import gather_from, gather_to, scatter_from, split_to
from axonn_tp.grid.mesh import Axes
from ted_moe.agreement import Agreement, begin_forward, check_callers, note
from ted_moe.dispatch import as_trained, combine, dispatch, exchange, exchange_in_turn
from ted_moe.gating import Routes


def share_out(counts: Tensor, shares: int) -> Tensor:
    """Count the rows of each expert in each share, if row number i is in share i modulo T.

    Args:
        counts: rows of each expert, E; rows are numbered expert by expert.
        shares: T.

    Returns:
        T × E.
    """
    ends = counts.cumsum(0)
    above = torch.arange(shares - 1, -1, -1, device=counts.device).unsqueeze(1)
    return (ends + above) // shares - (ends - counts + above) // shares


@dataclass(frozen=True)
class Sending:
    """The rows that a rank sends: where each route lies, and how many go to each expert rank.

    Attributes:
        slots: k × S: each route's row, share after share; beyond the last one: there is none.
        length: rows of the longest share.
        splits: rows of each of this rank's shares, by expert rank.
        full: every route has a row.
    """

    slots: Tensor
    length: int
    splits: list[list[int]]
    full: bool


def plan_sending(routes: Routes, table: Tensor, own: slice, ranks: int) -> Sending:
    """Find every route its row.

    Args:
        routes: of a dropless gate.
        table: `share_out` of its counts, T × E, on the CPU.
        own: this rank's shares.
        ranks: that have experts.
    """
    shares, length = table.shape[0], int(table[0].sum())
    starts = routes.exp_counts.cumsum(0) - routes.exp_counts
    numbers = starts[routes.experts.clamp(min=0)] + routes.places
    slots = numbers % shares * length + numbers // shares
    slots = torch.where(routes.experts >= 0, slots, shares * length)
    full = int(table.sum()) == routes.experts.numel()
    return Sending(slots, length, table[own].unflatten(1, (ranks, -1)).sum(2).tolist(), full)


@dataclass(frozen=True)
class Receiving:
    """The rows that a rank receives, in the order of its experts, and how many come from each rank.

    Attributes:
        order: where each row is among those of all shares, share after share, each padded to `length`; sorted by expert. None: they
            are of one share and for one expert.
        length: rows of the longest share.
        splits: rows of this rank's share, by expert rank.
        counts: rows of each expert here.
    """

    order: Tensor | None
    length: int
    splits: list[int]
    counts: list[int]


def plan_receiving(table: Tensor, share: int, device: torch.device) -> Receiving:
    """Sort what arrives by expert.

    Args:
        table: rows by the rank that sends them, share and expert of this rank, P × T × L, on the CPU.
        share: this rank's.
        device: for `order`.
    """
    ranks, shares, experts = table.shape
    totals = table.sum((0, 2))
    length, order = int(totals.max()), None
    if shares > 1 or experts > 1:
        padding = (length - totals).unsqueeze(1)
        runs = torch.cat([table.transpose(0, 1).flatten(1), padding], dim=1).flatten()
        kinds = torch.cat([torch.arange(experts).repeat(ranks), torch.tensor([experts])]).repeat(shares)
        kinds = kinds.to(device).repeat_interleave(runs.to(device), output_size=shares * length)
        order = kinds.argsort(stable=True)[: int(totals.sum())]
    return Receiving(order, length, table[:, share].sum(1).tolist(), table.sum((0, 1)).tolist())


def exchange_counts(table: Tensor, groups: Any, mixture: int = 0, trained: bool = False) -> tuple[Tensor, Tensor, bool]:
    """Tell the expert ranks how many rows come to each of their experts, and of which layer these are.

    Args:
        table: rows by share and expert, T × E.
        groups: the axes.
        mixture: the layer's number (`Groups.enrol`).
        trained: this rank's experts are, or some of them.

    Returns:
        What comes to this rank's L experts, by the rank that sends it: P × T × L. The layers' numbers by rank, P. Both are on the CPU. True if any
        rank's experts are trained.
    """
    ranks, shares = groups.size("expert"), table.shape[0]
    if ranks > 1:
        note(groups, "expert", mixture)
    counts = table.view(shares, ranks, -1).transpose(0, 1).flatten(1)
    said = counts.new_full((ranks, 1), 2 * mixture + trained)
    there = exchange(torch.cat([counts, said], 1), groups).cpu()
    return there[:, :-1].unflatten(1, (shares, -1)), there[:, -1] // 2, bool((there[:, -1] % 2).any())


def through_experts(
    tokens: Tensor,
    routes: Routes,
    experts: Callable[[Tensor, list[int]], Tensor],
    groups: Any,
    drop: bool,
    gathered: bool,
    fused: bool,
    mixture: int = 0,
    trained: bool = False,
    overlap_degree: int = 1,
) -> Tensor:
    """Send the tokens to their experts, run these and bring the outputs back.

    Args:
        tokens: S × M, the same on all tensor ranks.
        routes: of a dropless gate.
        experts: makes rows, sorted by this rank's experts, of rows; it is told how many each expert has.
        groups: the axes.
        drop: each tensor rank sends a share of the rows.
        gathered: the experts are split over the tensor ranks, so each of these needs what all of them received.
        fused: the experts leave their sums over the tensor ranks to this function.
        mixture: the layer's number (`Groups.enrol`), of all layers that exchange tokens between these ranks.
        trained: this rank's experts are, or some of them.
        overlap_degree: parts of a share, each an all-to-all of its own, which is under way while experts work on another (`exchange_in_turn`).

    Returns:
        S × M, weighted and summed over a token's experts.

    Raises:
        ValueError: tensor ranks do not route the same tokens, or others exchange those of another layer; on all ranks that they would
            exchange them with.
    """
    several_ranks = groups.size("tensor") > 1
    same = Agreement(0, tokens, groups, _number(routes.exp_counts), mixture) if several_ranks else None
    ranks, rank = (groups.size("tensor"), groups.rank("tensor")) if drop else (1, 0)
    shares, own = ranks * overlap_degree, slice(rank * overlap_degree, (rank + 1) * overlap_degree)
    table = share_out(routes.exp_counts, shares)
    arriving, callers, trained = exchange_counts(table if gathered else table[own], groups, mixture, trained)
    if same is not None:
        same.wait()
    check_callers(callers, mixture, groups)
    nothing = torch.zeros_like(table if gathered else table[own])
    begin_forward(groups, tokens.device, partial(_meet, groups, nothing, tokens.shape[1]))
    sending = plan_sending(routes, table.cpu(), own, groups.size("expert"))
    receiving = [
        plan_receiving(arriving[:, part::overlap_degree], rank if gathered else 0, tokens.device)
        for part in range(overlap_degree)
    ]

    def work(part: int, rows: Tensor) -> Tensor:
        plan = receiving[part]
        if gathered:
            rows = (gather_to if fused else gather_from)(_pad(rows, plan.length), groups, "tensor", 0)
        with nullcontext() if gathered else _own_random_numbers(tokens.device, groups):
            rows = rows if plan.order is None else rows.index_select(0, plan.order)
            rows = as_trained(experts(rows, plan.counts), trained)
        if plan.order is not None:
            rows = place_rows(rows, plan.order, (ranks if gathered else 1) * plan.length)
        if gathered:
            rows = (scatter_from if fused else split_to)(rows, groups, "tensor", 0)[: sum(plan.splits)]
        return rows

    # Of several shares some may be padded.
    rows = dispatch(tokens, sending.slots, shares * sending.length, groups, drop, shares == 1)
    padded = rows.view(overlap_degree, sending.length, rows.shape[1])
    parts = [part[: sum(splits)] for part, splits in zip(padded, sending.splits, strict=True)]
    back = exchange_in_turn(parts, work, groups, sending.splits, [plan.splits for plan in receiving])
    rows = back[0] if shares == 1 else torch.cat([_pad(part, sending.length) for part in back])
    if drop:
        rows = gather_from(rows, groups, "tensor", 0)
    return combine(rows, sending.slots, routes.weights, sending.full)


def _meet(groups: Any, table: Tensor, features: int, number: int) -> None:
    """The questions of a mixture without tokens."""
    nothing = table.new_zeros(0, features, dtype=torch.float32)
    same = Agreement(0, nothing, groups, 0, number) if groups.size("tensor") > 1 else None
    _, callers, _ = exchange_counts(table, groups, number)
    if same is not None:
        same.wait()
    check_callers(callers, number, groups)


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(order)
        return rows.new_zeros(length, rows.shape[1]).index_copy_(0, order, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def place_rows(rows: Tensor, order: Tensor, length: int) -> Tensor:
    """Rows where `order` puts them among zeros: `index_copy`, whose backward would keep all rows for their shape alone."""
    return _Place.apply(rows, order, length)


@contextmanager
def _own_random_numbers(device: torch.device, groups: Axes) -> Iterator[None]:
    """Tensor ranks whose experts draw for unequally many rows go on, behind these, with the same random numbers."""
    if groups.size("tensor") == 1:
        yield
        return
    seed = int(torch.randint(2**62, ())) + groups.rank("tensor")
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        torch.manual_seed(seed)
        yield


def _number(counts: Tensor) -> int:
    """One for each table of counts, as good as certainly."""
    factors = torch.full_like(counts, 6364136223846793005).cumprod(0)
    return int((counts * factors).sum() % 2**62)


def _pad(rows: Tensor, length: int) -> Tensor:
    return F.pad(rows, (0, 0, 0, length - rows.shape[0]))
