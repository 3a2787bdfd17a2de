"""The interface of systems, in terms of no host, and of hosts: the moments of a training run.

A system of one's own is a `System` and the `Block` of its key; see docs/design.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from axonn_plugins.config.base import Block
from axonn_plugins.config.systems import register
from axonn_tp import Mesh, layout_of


class Host(Protocol):
    """The framework that trains, as a system sees it.

    Attributes:
        model: this rank's part of the model.
        mesh: how the model lies on the ranks, or on those of this rank's pipeline stage; with a data axis alone where nothing is
            split.
    """

    model: nn.Module
    mesh: Mesh

    @property
    def steps(self) -> int:
        """Optimizer steps that were taken."""

    def serial_names(self) -> dict[nn.Parameter, str]:
        """Names of this rank's parameters in the serial model."""

    def stages_with(self, name: str) -> int:
        """Number of stages of a pipeline that hold a parameter of this name; 1 where it is not tied."""

    def counts(self, parameter: Tensor) -> bool:
        """True if this rank counts a parameter in a sum over all ranks, so that no replica is counted twice."""


@dataclass(frozen=True)
class Gradient:
    """A gradient, or the part of it that this rank updates by: averaged over the ranks, not clipped.

    Attributes:
        name: of its parameter, in the serial model.
        parameter: this rank's part.
        values: 1-D; changed in place they count. Ranks that have the same elements must change them alike.
        scale: the loss scale, by which they are multiplied.
    """

    name: str
    parameter: nn.Parameter
    values: Tensor
    scale: float
    _select: Callable[[Tensor], Tensor]
    _mesh: Mesh

    def part_of(self, whole: Tensor) -> Tensor:
        """The elements of a tensor of the serial parameter's shape that `values` has, 1-D."""
        layout = layout_of(self.parameter)
        on = self._mesh.over(layout.grid)
        return self._select(layout.shard(whole, on.grid, on.coordinates).reshape(-1))


class System:
    """A component of a run. Every method is a moment that the host gives it, on every rank; by default nothing is done.

    Args:
        block: its key in the ``"axonn"`` block.
        host: what trains.
    """

    Block: ClassVar[type[Block]]

    def __init_subclass__(cls, key: str, **rest: Any) -> None:
        """Make a key of the block known.

        Args:
            key: its name; class attribute `Block` says what may be in it.
            rest: of other base classes.

        Raises:
            ValueError: the suite has such a key.
        """
        super().__init_subclass__(**rest)
        register(key, cls.Block, cls)

    def __init__(self, block: Any, host: Host) -> None:
        self.block, self.host = block, host

    def gradients(self, gradients: Iterable[Gradient]) -> None:
        """Gradients are averaged, and not clipped yet."""

    def stepped(self) -> None:
        """The optimizer has made a step, or skipped it for an overflow."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint keeps, the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, on any grid."""
