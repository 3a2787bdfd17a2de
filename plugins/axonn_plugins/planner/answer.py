"""The answer to a question: the best configurations of several strategies, and what would change them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from axonn_plugins.planner import fourd
from axonn_plugins.planner.machine import Machine
from axonn_plugins.planner.model import Model, Transformer
from axonn_plugins.planner.search import AnyPlan, Constraints, Found, faster_but_too_large, search
from axonn_plugins.planner.setting import Setting
from axonn_plugins.planner.transformer import STRATEGIES, Mode

AnyStrategy = Literal["1d", "2d", "summa", "axonn"]
EVERY: tuple[AnyStrategy, ...] = (*STRATEGIES, "axonn")
"""Tensor × pipeline × data parallelism in three kinds, and 4D grids."""

CHANGES: tuple[tuple[str, str, float], ...] = (
    ("half the bandwidth between domains", "slow_bandwidth", 0.5),
    ("twice the bandwidth between domains", "slow_bandwidth", 2.0),
    ("half the bandwidth within domains", "fast_bandwidth", 0.5),
    ("twice the bandwidth within domains", "fast_bandwidth", 2.0),
    ("half the memory bandwidth", "memory_bandwidth", 0.5),
    ("half the memory", "memory", 0.5),
    ("twice the memory", "memory", 2.0),
    ("twice the tensor peak", "tensor", 2.0),
)
"""Changes whose effect is told: in words, the machine's attribute, the factor."""
_ALL = 10**9


@dataclass(frozen=True)
class Question:
    """A question: the machine, the model, the number of GPUs and the limits of the search.

    Attributes:
        machine: where it shall run.
        model: what is trained; a U-Net with the strategy "axonn" alone.
        gpus: how many.
        batch: samples of a step.
        strategies: which compete.
        mode: "calibrated" by published measurements, "roofline" of 004, or "paper" with the published results' defects.
        fixed: sizes that are given, such as ``{"np": 4}``.
        setting: how it is trained, beyond the paper.
    """

    machine: Machine
    model: Model
    gpus: int
    batch: int
    strategies: Sequence[AnyStrategy]
    mode: Mode = "calibrated"
    fixed: Mapping[str, int] | None = None
    setting: Setting = Setting()


@dataclass(frozen=True)
class Answer:
    """The answer to a question: plans, and the numbers of those that were tried.

    Attributes:
        question: what was asked.
        best: configurations that fit, of all strategies, the fastest first.
        nearest: configurations that do not fit, those that lack least memory first.
        found: each strategy's search.
    """

    question: Question
    best: list[AnyPlan]
    nearest: list[AnyPlan]
    found: dict[AnyStrategy, Found]


def answer(question: Question, top: int = 10) -> Answer:
    """Search with each strategy and rank all together; 2D with n2 = 1 is left out where 1D competes, which it then is.

    Args:
        question: what is asked.
        top: how many configurations are returned.
    """
    found = {strategy: _search(question, question.machine, strategy, top) for strategy in question.strategies}
    best = sorted((plan for one in found.values() for plan in one.best), key=lambda plan: plan.seconds)
    nearest = sorted((plan for one in found.values() for plan in one.nearest), key=lambda plan: plan.bytes)
    return Answer(question, best[:top], nearest[:top], found)


def too_large(asked: Answer) -> list[AnyPlan]:
    """The configuration with least memory of each strategy, among those that would beat the best if they fitted."""
    limit = asked.best[0].seconds if asked.best else float("inf")
    plans = [_too_large(asked.question, strategy, limit) for strategy in asked.question.strategies]
    return [plan for plan in plans if plan is not None]


def sensitivity(asked: Answer) -> list[tuple[str, AnyPlan | None]]:
    """The best configuration after each of `CHANGES` of the machine."""
    question = asked.question
    changed = []
    for words, attribute, factor in CHANGES:
        best = answer(replace(question, machine=_changed(question.machine, attribute, factor)), 1).best
        changed.append((words, best[0] if best else None))
    return changed


def _changed(machine: Machine, attribute: str, factor: float) -> Machine:
    """A machine with one of its numbers, and what was measured of the same, so many times as large."""
    changes: dict[str, Any] = {attribute: factor * getattr(machine, attribute)}
    if attribute == "tensor":
        measured = {name: getattr(machine, name) for name in ("sustained", "fp8")}
        changes |= {name: factor * rate for name, rate in measured.items() if rate is not None}
    if attribute == "fast_bandwidth":
        changes["within"] = {groups: factor * rate for groups, rate in machine.within.items()}
    return replace(machine, **changes)


def _search(question: Question, machine: Machine, strategy: AnyStrategy, top: int) -> Found:
    q, constraints = question, _constraints(question, strategy)
    if strategy == "axonn":
        return fourd.search(machine, q.model, q.gpus, q.batch, q.mode, top, constraints, q.setting)
    assert isinstance(q.model, Transformer)
    return search(machine, q.model, strategy, q.gpus, q.batch, q.mode, top, constraints, q.setting)


def _too_large(q: Question, strategy: AnyStrategy, limit: float) -> AnyPlan | None:
    if strategy != "axonn":
        assert isinstance(q.model, Transformer)
        constraints = _constraints(q, strategy)
        return faster_but_too_large(
            q.machine, q.model, strategy, q.gpus, q.batch, q.mode, limit, constraints, q.setting
        )
    found = _search(q, replace(q.machine, memory=float("inf")), strategy, _ALL)
    lacking = [plan for plan in found.best if plan.bytes > q.machine.memory and plan.seconds < limit]
    return min(lacking, key=lambda plan: plan.bytes, default=None)


def _constraints(question: Question, strategy: AnyStrategy) -> Constraints:
    repeats = strategy == "2d" and "1d" in question.strategies
    return Constraints(question.fixed or {}, {"n2": 2} if repeats else {})
