"""Members of enumerations in Megatron's checkpoints, whose arguments have some.

Python 3.11.2, as other early 3.11, saves them as `getattr` of their class, and signals as names in their module, which torch reads from no
file since 2.6. Nothing that such a Python has saved could then be gone on with, in stock Megatron neither.
"""

from __future__ import annotations

import enum
import pickle
import signal
from typing import Any

import torch


def readable() -> None:
    """Have `torch.load` read signals, and members of enumerations that are among its safe globals; harmless when called again."""
    signals: list[Any] = [(one, f"signal.{one.name}") for one in signal.Signals]
    torch.serialization.add_safe_globals([(_member, "builtins.getattr"), *signals])


def _member(kind: object, name: str) -> object:
    """A member by its name, and no other attribute of anything."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"{name} of {kind!r} is no member of an enumeration, which alone is read")
