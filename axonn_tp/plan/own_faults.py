"""Telling a fault of this package from a model that cannot be run or split, where the search for a plan tries one."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

_HERE = str(Path(__file__).parents[1])
# What a mistake in code raises; torch says by RuntimeError and ValueError that shapes do not fit.
_MISTAKES = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, TypeError)


def let_out(error: Exception) -> None:
    """Under ``AXONN_DEBUG=1`` raise again what our own code got wrong; else do nothing, and the search goes on.

    Args:
        error: what an attempt to run a model, or a share of it, has raised.
    """
    if os.environ.get("AXONN_DEBUG") == "1" and is_own_fault(error):
        raise error


def is_own_fault(error: BaseException) -> bool:
    """True if an error is a mistake in code, and code of this package made it: not the model's, and not torch's."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, _MISTAKES) and bool(frames) and frames[-1].filename.startswith(_HERE)
