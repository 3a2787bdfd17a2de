"""Attributes of Megatron's modules and classes that are replaced, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Originals:
    """The originals of all that was replaced, to be restored in the opposite order."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute that the owner has itself."""
        self._replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute by what `make` makes of it."""
        self.replace(owner, name, make(vars(owner)[name]))

    def restore(self) -> None:
        """Put everything back."""
        while self._replaced:
            owner, name, value = self._replaced.pop()
            setattr(owner, name, value)
