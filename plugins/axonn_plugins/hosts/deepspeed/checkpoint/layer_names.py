"""Names of a pipeline stage's tensors in a checkpoint that has all stages."""

from __future__ import annotations

from torch import nn

from axonn_tp.checkpoint.dealt import DealtNames

_EXTRA = "_extra_state"


class LayerNames(DealtNames):
    """Translates the names of one stage's tensors: other stages have the other layers.

    Args:
        model: the stage.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self._own = {name for name, _ in named}
        self._modules = {name for name, _ in model.named_modules()}

    def inward(self, name: str) -> str | None:
        """This rank's name; None for other stages' layers and other ranks' experts."""
        found = super().inward(name)
        if found is None:
            return None
        kind, _, rest = found.partition(".")
        plain = rest if kind in ("model", "optimizer") else found
        if plain.endswith(_EXTRA):
            return found if plain.removesuffix(_EXTRA).rstrip(".") in self._modules else None
        return found if {plain, plain.rpartition(".")[0]} & self._own else None
