"""Masks of parameters that are pruned and not trained now: no optimizer has them, and checkpoints go on with them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from samo.mask_file import pack, unpack


class FrozenMasks:
    """Keeps masks of this rank's parts, eight elements a byte.

    Args:
        parameters: by name, those that are not trained.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._packed: dict[str, Tensor] = {}

    def take(self, masks: Mapping[str, Tensor]) -> None:
        """The model is pruned by these masks."""
        self._packed |= {name: pack(mask) for name, mask in masks.items() if name in self._parameters}

    def forget(self) -> None:
        """The model is not pruned any more."""
        self._packed.clear()

    def of(self, name: str) -> Tensor:
        """The mask of a parameter; of one that was not pruned when the masks came, whatever is not zero is kept."""
        parameter = self._parameters[name].detach()
        return unpack(self._packed[name], tuple(parameter.shape)).to(parameter.device) | (parameter != 0)
