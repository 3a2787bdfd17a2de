"""Names of experts: each rank counts its own from 0, a checkpoint counts all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from axonn_plugins.hosts.deepspeed.checkpoint.stock_plan import EXPERT
from axonn_plugins.hosts.deepspeed.ted.layers import TedMoE
from axonn_tp.checkpoint.state import Notes


class ExpertNames:
    """Translates the names of one rank's tensors.

    Args:
        model: with TED's layers, all dealt out over the same ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._local, self._rank = {}, 0
        for name, layer in model.named_modules():
            if isinstance(layer, TedMoE):
                prefix = f"{name}." if name else ""
                self._local[f"{prefix}deepspeed_moe.experts.deepspeed_experts."] = len(layer.local)
                self._rank = layer.groups.rank("expert")

    def outward(self, name: str, rank: int | None = None) -> str:
        """The name in a checkpoint of what this rank, or another one of the expert ranks, has."""
        before, number, after, local = self._parts(name)
        return f"{before}{number + (self._rank if rank is None else rank) * local}{after}" if local else name

    def inward(self, name: str) -> str | None:
        """This rank's name for what a checkpoint holds; None for other ranks' experts."""
        before, number, after, local = self._parts(name)
        rank, own = divmod(number, local) if local else (self._rank, 0)
        if rank != self._rank:
            return None
        return f"{before}{own}{after}" if local else name

    def _parts(self, name: str) -> tuple[str, int, str, int]:
        """What is before an expert's number, the number, what is behind it, and how many experts the rank has of the layer."""
        found = EXPERT.fullmatch(name)
        if found is None:
            return name, 0, "", 0
        before, number, after = found.groups()
        # Names of tensors in a checkpoint have a word before the model's; one layer's name may end another's.
        fitting = [prefix for prefix in self._local if before == prefix or before.endswith(f".{prefix}")]
        return before, int(number), after, self._local[max(fitting, key=len)] if fitting else 0

    def notes(self, notes: Notes, translate: Callable[[str], str | None]) -> Notes:
        """Notes of a checkpoint with the names translated, without what has no name then."""

        def keys(table: dict[str, Any]) -> dict[str, Any]:
            return {name: value for key, value in table.items() if (name := translate(key)) is not None}

        def translated(names: list[str]) -> list[str]:
            return [name for each in names if (name := translate(each)) is not None]

        made = {**notes, "model": {part: keys(table) for part, table in notes["model"].items()}}
        if "tensors" in notes:
            made["tensors"] = keys(notes["tensors"])
        if "optimizer" in notes:
            saved = notes["optimizer"]
            groups = [{**group, "params": translated(group["params"])} for group in saved["groups"]]
            parts = {part: keys(saved[part]) for part in ("tensors", "others")}
            made["optimizer"] = {**saved, "groups": groups, **parts}
        return made


class LayerNames(ExpertNames):
    """Translates the names of one stage's tensors: other stages have the other layers.

    Args:
        model: the stage.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        self._modules = {name for name, _ in model.named_modules()}

    def inward(self, name: str) -> str | None:
        """This rank's name; None for other stages' and other ranks' experts."""
        found = super().inward(name)
        if found is None:
            return None
        kind, _, rest = found.partition(".")
        plain = rest if kind in ("model", "optimizer") else found
        whole = {plain, plain.rpartition(".")[0]} if kind == "optimizer" else {plain}
        module = plain.removesuffix("_extra_state").rstrip(".")
        return found if whole & self._own or (plain.endswith("_extra_state") and module in self._modules) else None


def merged(everyone: list[Notes]) -> Notes:
    """One rank's notes with what the others have besides."""
    first = everyone[0]
    for notes in everyone[1:]:
        for part, table in notes["model"].items():
            first["model"][part] |= table
        for part in ("tensors", "others") if "optimizer" in notes else ():
            first["optimizer"][part] |= notes["optimizer"][part]
        for here, there in zip(*(n.get("optimizer", {}).get("groups", []) for n in (first, notes)), strict=True):
            here["params"] += [name for name in there["params"] if name not in set(here["params"])]
    return first
