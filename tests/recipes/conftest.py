"""What the recipes' tests have in common.

A recipe gives a rank its share of the machine's cores. A test has one core, on which two threads that look for each other's work
only take each other's time (a serial run's six seconds became ten).

Whatever draws a run, and writes its events, is imported once instead of by the first rank of every run.
"""

import os
from collections.abc import Iterator
from contextlib import suppress

import pytest


@pytest.fixture(scope="module", autouse=True)
def one_core() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def drawing_is_imported() -> None:
    with suppress(ImportError):
        import matplotlib.figure  # noqa: F401
    with suppress(ImportError):
        import torch.utils.tensorboard  # noqa: F401


@pytest.fixture(scope="module")
def by_pccl() -> Iterator[None]:
    """Ranks of a recipe talk by pccl where they would by gloo, as those of other tests do; forked ones, not new interpreters."""
    import torch.distributed as dist

    from tests.distributed import BACKEND, compiled

    compiled()
    start = dist.init_process_group

    def started(backend: str | None = None, *arguments: object, **options: object) -> None:
        start(BACKEND if backend == "gloo" else backend, *arguments, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", started)
        yield
