"""Telling a fault of this package from a model that cannot be run or split, where the search for a plan tries one."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import torch

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


def failing_line(error: BaseException) -> tuple[str, str] | None:
    """The place and the code of the last line on an error's way that is neither this package's nor torch's; nothing where there is none."""
    theirs = (_HERE, str(Path(torch.__file__).parent))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.line and not frame.filename.startswith(theirs):
            return f"{Path(frame.filename).name}:{frame.lineno}", frame.line
    return None
