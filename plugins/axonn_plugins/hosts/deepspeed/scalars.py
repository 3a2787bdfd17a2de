"""Parameters of no dimensions, of which DeepSpeed's broadcast would view the bytes, which torch does for vectors alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def as_vectors(module: nn.Module) -> Iterator[None]:
    """Parameters of no dimensions are vectors of one element."""
    scalars = [parameter for parameter in module.parameters() if not parameter.dim()]
    for parameter in scalars:
        parameter.data = parameter.data.view(1)
    try:
        yield
    finally:
        for parameter in scalars:
            parameter.data = parameter.data.view(())
