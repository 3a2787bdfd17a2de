"""Names of modules that are dealt out to ranks, as experts are: each rank counts its own from 0, the serial model counts all."""

from __future__ import annotations

from torch import nn


class Dealt(nn.ModuleList):
    """This rank's of the modules in a list; every rank has as many, the first rank the first ones."""


class DealtNames:
    """Translates names of tensors.

    Args:
        model: whose they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._local = {
            f"{name}.": len(module)
            for name, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, Dealt)
        }

    def serial(self, name: str, home: int) -> str:
        """The serial model's name of what rank number `home`, of those with modules of their own, has under `name`."""
        prefix = max((prefix for prefix in self._local if name.startswith(prefix)), key=len, default="")
        if not prefix:
            return name
        number, _, rest = name.removeprefix(prefix).partition(".")
        return f"{prefix}{int(number) + home * self._local[prefix]}.{rest}"
