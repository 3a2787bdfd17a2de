"""The answers of layers that a model on trial asks for in a simulated pass."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from axonn_tp.plan.search.replay import Related


class Answers(Related, Protocol):
    """Stands in for layers; each answers to what it was given, by its name."""

    def linear(self, name: str, input: Tensor) -> Tensor:
        """A linear's answer."""

    def boundary(self, name: str, input: Tensor) -> tuple[Tensor, Tensor] | None:
        """The whole of a share that a module is given, and its answer's share; nothing where it is given whole rows."""

    def norm(self, name: str, input: Tensor) -> Tensor | None:
        """A norm's answer to a share; nothing where it is given whole rows."""

    def embedding(self, name: str, input: Tensor) -> Tensor:
        """This rank's share of what was looked up."""
