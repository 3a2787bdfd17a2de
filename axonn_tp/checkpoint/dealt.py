"""Names of modules that are dealt out to ranks, as experts are: each rank counts its own from 0, a checkpoint counts all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import compress
from typing import Any

from torch import Tensor, nn

Notes = dict[str, Any]


class Dealt(nn.ModuleList):
    """This rank's modules of a list; every rank has as many, the first one the first.

    Attributes:
        home: this rank's number among those that have different ones.
    """

    home: int = 0

    @property
    def each(self) -> int:
        """The number of modules that every rank has; what else hangs on the list has a name."""
        return sum(name.isdigit() for name in self._modules)


class DealtNames:
    """Translates the names of one rank's tensors.

    Args:
        model: whose they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._lists = {
            f"{name}.": module
            for name, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, Dealt)
        }

    def __bool__(self) -> bool:
        return bool(self._lists)

    def outward(self, name: str, home: int | None = None) -> str:
        """The name in a checkpoint of what this rank, or another one that has modules of its own, has."""
        before, number, after, dealt = self._parts(name)
        if dealt is None:
            return name
        return f"{before}{number + (dealt.home if home is None else home) * dealt.each}{after}"

    def inward(self, name: str) -> str | None:
        """This rank's name for what a checkpoint holds; None for other ranks' modules."""
        before, number, after, dealt = self._parts(name)
        if dealt is None:
            return name
        home, own = divmod(number, dealt.each)
        return f"{before}{own}{after}" if home == dealt.home else None

    def _parts(self, name: str) -> tuple[str, int, str, Dealt | None]:
        """Split a name at a module's number: the text before it, the number, the text behind it, and the list that the module is in."""
        # Names of tensors in a checkpoint have a word before the model's; one list's name may end another's.
        fitting = [prefix for prefix in self._lists if f".{prefix}" in f".{name}"]
        if not fitting:
            return name, 0, "", None
        prefix = max(fitting, key=len)
        before, _, behind = name.rpartition(prefix)
        number, dot, after = behind.partition(".")
        if not number.isdigit():
            return name, 0, "", None
        return f"{before}{prefix}", int(number), f"{dot}{after}", self._lists[prefix]

    def notes(self, notes: Notes, translate: Callable[[str], str | None]) -> Notes:
        """Notes of a checkpoint with the names translated, without what has no name then."""

        def keys(table: dict[str, Any]) -> dict[str, Any]:
            return {name: value for key, value in table.items() if (name := translate(key)) is not None}

        def translated(names: list[str]) -> list[str]:
            return [name for each in names if (name := translate(each)) is not None]

        model = {part: keys(table) for part, table in notes["model"].items()}
        model["aliases"] = {name: translate(first) for name, first in model["aliases"].items()}
        made = {**notes, "model": model}
        if "tensors" in notes:
            made["tensors"] = keys(notes["tensors"])
        if "optimizer" in notes:
            saved = notes["optimizer"]
            groups = [{**group, "params": translated(group["params"])} for group in saved["groups"]]
            parts = {part: keys(saved[part]) for part in ("tensors", "others")}
            made["optimizer"] = {**saved, "groups": groups, **parts}
        return made


def leave_out(parameters: Iterable[nn.Parameter]) -> None:
    """Mark parameters that are another rank's and free them: whoever took hold of them before lets them go by `still_here`."""
    for parameter in parameters:
        parameter.axonn_elsewhere = True  # type: ignore[attr-defined]
        parameter.data = parameter.data.new_empty(0)


def still_here(given: Iterable[Any]) -> list[Any]:
    """Parameters, pairs of names and parameters, or groups of an optimizer, without the parameters that are another rank's; groups in place."""
    kept = []
    for entry in given:
        if isinstance(entry, dict):
            held = [entry["params"]] if isinstance(entry["params"], Tensor) else list(entry["params"])
            here = [not _elsewhere(one) for one in held]
            entry["params"] = list(compress(held, here))
            if "param_names" in entry:
                entry["param_names"] = list(compress(entry["param_names"], here))
        if isinstance(entry, dict) or not _elsewhere(entry):
            kept.append(entry)
    return kept


def _elsewhere(entry: Any) -> bool:
    return getattr(entry[1] if isinstance(entry, tuple) else entry, "axonn_elsewhere", False)
