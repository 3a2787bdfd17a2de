"""Passes of a shadow in training, where a model's own code asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from axonn_tp.plan.own_faults import let_out
from axonn_tp.plan.search.runs import Run
from axonn_tp.plan.search.shadow import Shadow
from axonn_tp.plan.search.training import asks_for_training


@contextmanager
def in_training(shadow: Shadow, name: str, arguments: tuple[tuple, dict[str, Any]]) -> Iterator[Run | None]:
    """Inside, passes are those of training; gives a whole one of the module `name`, None where it would tell nothing."""
    run: Run | None = None
    if asks_for_training(shadow.modules[name]):
        shadow.in_training = True
        try:
            run = shadow.whole(name, arguments)
            run.settle()
            run = None if shadow.drew else run
        except Exception as error:
            let_out(error)
    try:
        yield run
    finally:
        shadow.in_training = False
