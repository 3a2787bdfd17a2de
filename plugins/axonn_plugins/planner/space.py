"""The space of configurations: every way to split GPUs over tensor, pipeline and data parallelism, and to place them (004, step S3)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

from axonn_plugins.planner.model import Transformer
from axonn_plugins.planner.step import Candidates
from axonn_plugins.planner.transformer import Strategy

_SMALLEST = 128
"""Least features, and positions, of a rank's share of a matrix multiplication."""
_SMALLEST_PANEL = 512


@cache
def divisors(n: int) -> tuple[int, ...]:
    """All of them, ascending."""
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return tuple(sorted({*small, *(n // i for i in small)}))


@cache
def factorizations(n: int, parts: int) -> tuple[tuple[int, ...], ...]:
    """Every ordered way to write n as a product of `parts` numbers."""
    if parts == 1:
        return ((n,),)
    return tuple((first, *rest) for first in divisors(n) for rest in factorizations(n // first, parts - 1))


def shapes(model: Transformer, strategy: Strategy, gpus: int, batch: int, uneven: bool = False) -> Candidates:
    """Configurations before placement, in which each axis has one GPU of a domain.

    Args:
        model: what is trained.
        strategy: of tensor parallelism.
        gpus: n1 · n2 · np · nd.
        batch: samples of a step.
        uneven: whether some stages may have a layer less than others.
    """
    rows = [
        (n1, n2, stages, replicas, microbatch, panels)
        for n1, n2, stages, replicas in _splits(model, strategy, gpus, batch, uneven)
        for microbatch in divisors(batch // replicas)
        if microbatch * model.sequence % _positions_divisor(strategy, n1, n2) == 0
        for panels in _panels(model, strategy, n1, n2)
    ]
    table = np.array(rows, np.int64).reshape(-1, 6)
    ones = np.ones((4, len(table)), np.int64)
    return Candidates(*table.T, *ones)


def placed(at: Candidates, gpus: int, domain: int, uneven: bool = False) -> Candidates:
    """Each configuration with every way to fill domains: v1 · v2 · vp · vd GPUs of one, each a divisor of its group.

    Args:
        at: configurations before placement.
        gpus: of a configuration.
        domain: GPUs that the fast network joins; all GPUs are within one where they are no more.
        uneven: whether groups may straddle domains that none fills; they count as if domains were the largest that some fill.
    """
    groups = np.stack([at.n1, at.n2, at.np, at.nd])
    if gpus <= domain:
        return _with(at, np.arange(len(at)), groups)
    # Configurations of one split of the GPUs follow one another, and are placed alike.
    begins = np.ones(len(at), bool)
    begins[1:] = (groups[:, 1:] != groups[:, :-1]).any(axis=0)
    split = np.cumsum(begins) - 1
    ways = _ways(groups[:, begins].T, domain, uneven)
    counts = np.array([len(one) for one in ways], np.int64)
    shape = np.repeat(np.arange(len(at)), counts[split])
    near = np.concatenate([ways[one] for one in split]) if len(at) else np.zeros((0, 4), np.int64)
    return _with(at, shape, near.T)


def _ways(splits: npt.NDArray, domain: int, uneven: bool) -> list[npt.NDArray]:
    """The ways in which each split of the GPUs fills domains."""
    found = [np.zeros((0, 4), np.int64)] * len(splits)
    left = np.arange(len(splits))
    for size in range(domain, 0 if uneven else domain - 1, -1):
        ways = np.array(factorizations(size, 4), np.int64)
        fits = (splits[left][:, None, :] % ways[None] == 0).all(axis=2)
        for one, which in zip(left, fits, strict=True):
            found[one] = ways[which]
        left = left[~fits.any(axis=1)]
        if not len(left):
            break
    return found


def _with(at: Candidates, shape: npt.NDArray, near: npt.NDArray) -> Candidates:
    few = at.take(shape)
    return Candidates(few.n1, few.n2, few.np, few.nd, few.bm, few.panels, *near)


def _splits(
    model: Transformer, strategy: Strategy, gpus: int, batch: int, uneven: bool
) -> Iterator[tuple[int, int, int, int]]:
    """Sizes of the four groups that divide what they split."""
    for n1 in divisors(gpus):
        if any(size % n1 for size in (model.split_heads, *model.features)):
            continue
        if strategy == "1d" and (model.heads + 2 * model.kv) * model.q // n1 < _SMALLEST:
            continue
        if strategy == "2d" and model.hidden // n1 < _SMALLEST:
            continue
        for n2 in divisors(gpus // n1) if strategy != "1d" else (1,):
            if strategy == "2d" and model.sequence // n2 < _SMALLEST:
                continue
            if strategy == "summa" and model.hidden % n2:
                continue
            for stages in divisors(gpus // n1 // n2):
                replicas = gpus // n1 // n2 // stages
                if (uneven and stages <= model.layers or model.layers % stages == 0) and batch % replicas == 0:
                    yield n1, n2, stages, replicas


def _positions_divisor(strategy: Strategy, n1: int, n2: int) -> int:
    return n2 if strategy == "summa" else n1 * n2


@cache
def _panels(model: Transformer, strategy: Strategy, n1: int, n2: int) -> tuple[int, ...]:
    """Numbers of SUMMA's panels: as many as the longer side of the grid, doubled while a panel stays long enough."""
    if strategy != "summa":
        return (1,)
    least, found = max(n1, n2), []
    if model.hidden / least < _SMALLEST_PANEL:
        return (least,)
    while model.hidden / least >= _SMALLEST_PANEL:
        if model.hidden % least == 0:
            found.append(least)
        least *= 2
    return tuple(found)
