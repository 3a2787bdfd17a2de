"""Losses that a script differentiates itself, looked at as hosts' are (`axonn_tp.layers.loss_watch`): where autograd is called, they are all there."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from axonn_tp.comm.before_backward import before_backward
from axonn_tp.comm.overlap import in_backward
from axonn_tp.layers.loss_watch import refuse_losses

_CALLS = 4
"""Backward passes that are looked at behind a forward: there may be one of another model, or several of it."""
_left: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def look_at_losses(model: nn.Module) -> None:
    """A forward of the model begins that is looked at: so are the next backward passes."""
    _left[model] = _CALLS
    before_backward(_look)


def _look(tensors: Any, args: tuple, keywords: dict[str, Any]) -> None:
    if len(args) > 2 and args[2]:
        _left.clear()  # what is made of gradients (create_graph) leads to weights past their layers
    # Gradients that a script asks for (`torch.autograd.grad`) are its own, and a recomputation's are of a part.
    if _left and keywords.get("accumulate_grad") and not in_backward():
        losses = [one for one in tensors if isinstance(one, Tensor)]
        for model, left in list(_left.items()):
            _left[model] = left - 1
            if left == 1:
                del _left[model]
            refuse_losses(model, losses)
