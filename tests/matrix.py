"""Matrices of cases: what covers every axis of one is in every run, the rest with the marker `thorough`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


def thorough(*values: Any) -> Any:
    """Parameters of a test that is not in every run."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def names(cases: Iterable[str], every_run: Collection[str]) -> list[Any]:
    """Parameters of a test: the names of cases, those that are not in every run marked."""
    return [name if name in every_run else thorough(name) for name in cases]


def asked(request: pytest.FixtureRequest, *parameters: str) -> set[tuple[Any, ...]]:
    """Cases that this run asks the tests of the file for, by these parameters of theirs."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return {tuple(item.callspec.params.get(name) for name in parameters) for item in items}


def chosen(request: pytest.FixtureRequest, cases: dict[str, Case]) -> dict[str, Case]:
    """The cases that this run asks for by the parameter `name`: what a fixture has to train."""
    names_asked = asked(request, "name")
    return {name: case for name, case in cases.items() if (name,) in names_asked}
