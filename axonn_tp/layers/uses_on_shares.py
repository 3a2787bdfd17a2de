"""Plain tensors that come to activations in a pass, as `axonn_tp.layers.shared_uses` looks at them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from axonn_tp.comm.shard_gradients import OwnRead
from axonn_tp.layers.whole_weight import WholeWeight, in_place


@dataclass
class UsesOnShares:
    """Differentiable plain tensors that come to activations in a pass.

    Attributes:
        nodes: by which they come.
        parameters: among them, by id, each with the axes along which the shares differ.
    """

    nodes: list[Any] = field(default_factory=list)
    parameters: dict[int, tuple[Tensor, set[str]]] = field(default_factory=dict)


uses_on_shares: list[UsesOnShares] = []
"""For each pass that `axonn_tp.layers.shared_uses` looks at, one inside another."""


def noted_uses(
    function: Any, args: tuple, kwargs: dict[str, Any], over: tuple[str, ...]
) -> tuple[tuple, dict[str, Any]]:
    """Arguments of a function of activations, those without a split noted.

    Args:
        function: torch's.
        args: its arguments.
        kwargs: its keyword arguments.
        over: axes along which the activations differ.
    """
    kept = 1 if in_place(function) else 0  # what is changed in place stays itself
    noted = tuple(_noted_use(arg, over) for arg in args[kept:])
    return (*args[:kept], *noted), {key: _noted_use(arg, over) for key, arg in kwargs.items()}


def _noted_use(arg: Any, over: tuple[str, ...]) -> Any:
    if type(arg) in (tuple, list):
        return type(arg)(_noted_use(one, over) for one in arg)
    if type(arg) not in (Tensor, Parameter, WholeWeight) or not (arg.requires_grad or type(arg) is Parameter):
        return arg
    uses = uses_on_shares[-1]
    if type(arg) is Parameter:
        uses.parameters.setdefault(id(arg), (arg, set()))[1].update(over)
    if not arg.requires_grad:
        return arg
    made: Tensor = OwnRead.apply(arg) if type(arg) is Parameter else arg.view_as(arg)
    if made.requires_grad:
        uses.nodes.append(made.grad_fn)
    return made
