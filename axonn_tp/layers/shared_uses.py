"""Parameters that are used on shares of an activation and otherwise, too: refused in a model's first training pass, or a later one that is looked at.

The gradient of a use on a share is the share's, to be summed over the ranks of x and y, and that of a use on whole activations is whole
on every rank: a parameter gets the sum of both, which is neither. The automatic plan splits no such pair of layers; a plan by hand may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from axonn_tp.comm.overlap import in_backward
from axonn_tp.comm.shard_gradients import Watch
from axonn_tp.comm.share_gradients import refuse_other_uses
from axonn_tp.comm.unplanned_gradients import used_on_shares
from axonn_tp.grid.leaves import tensors_in
from axonn_tp.grid.mesh import Mesh
from axonn_tp.layers.uses_on_shares import UsesOnShares, uses_on_shares


class _Open:
    """A pass whose backward has not begun, for as long as its outputs live."""


class SharedUses:
    """Looks at passes of a model that was split, fewer and fewer: a penalty may come into the loss later than in the first.

    Passes whose backward may be one (of a pair of images, of real and forged ones) are looked at all together, or none of them.

    Args:
        mesh: the mesh.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._uses: UsesOnShares | None = None
        self._given: list[Tensor] = []
        self._watches: list[Watch] = []
        self._open: WeakSet[_Open] = WeakSet()
        self._rounds = 0

    def __deepcopy__(self, memo: dict) -> SharedUses:
        """A copied model's passes are its own."""
        return SharedUses(self._mesh)

    @property
    def looks(self) -> bool:
        """True if the pass that began last is looked at."""
        return not self._rounds & (self._rounds - 1)

    def begin(self, given: Any) -> None:
        """A forward begins that will be differentiated.

        Args:
            given: its arguments.
        """
        if not self._open:
            for watch in self._watches:
                watch.end()
            self._watches.clear()
            self._rounds += 1
        if self.looks:
            self._given = [tensor for tensor in tensors_in(given) if tensor.requires_grad]
            self._uses = UsesOnShares()
            uses_on_shares.append(self._uses)

    def end(self, model: nn.Module, outputs: Any) -> None:
        """A forward of the model ends.

        Raises:
            ValueError: the outputs are made of a parameter in both ways, or an argument that needs a gradient met shares; the same on all ranks
                of x and y.
        """
        uses, self._uses = self._uses, None
        given, self._given = self._given, []
        if torch.is_grad_enabled():
            self._note_open(outputs)
        if uses is None:
            return
        uses_on_shares[:] = [one for one in uses_on_shares if one is not uses]
        for parameter, axes in uses.parameters.values():
            used_on_shares(parameter, axes, self._mesh)
        if uses.nodes:
            _refuse_arguments(given, uses.nodes)
        name = used_on_both(model, outputs, uses.nodes) if uses.nodes else None
        if name is not None:
            raise ValueError(_twice(name))
        for name, named in model.named_parameters():
            if id(named) in uses.parameters and not hasattr(named, "axonn_layout"):
                self._watches += refuse_other_uses(named, _twice(name))

    def _note_open(self, outputs: Any) -> None:
        now = _Open()
        for tensor in tensors_in(outputs):
            if tensor.grad_fn is not None and not in_backward():
                self._open.add(now)
                tensor.register_hook(lambda gradient, now=now: self._open.discard(now))


def _twice(name: str) -> str:
    return (
        f"{name} is used on features that a pair of the plan splits, where its gradient is a share's, and outside of the pair, where it is whole, and "
        "no sum over ranks is right for both; leave that pair's layers out of the plan, which makes them self_contained, or use another parameter there "
        "(a penalty on weights is the optimizer's weight decay)"
    )


def _refuse_arguments(given: Iterable[Tensor], uses: Iterable[Any]) -> None:
    """Refuse arguments of the model of whose gradients each rank would have the part of its share.

    Raises:
        ValueError: one that needs a gradient came to shares past all layers.
    """
    leaves, nodes = _below(uses, _of_a_layer)
    for tensor in given:
        if id(tensor) in leaves or tensor.grad_fn in nodes:
            raise ValueError(
                f"the model is given a tensor of shape {tuple(tensor.shape)} that needs a gradient, and uses it on features or tokens that the plan splits, "
                "where each rank would give it the gradient of its share alone; leave the layers around that use out of the plan, which makes them "
                "self_contained, or give it detached"
            )


def used_on_both(model: nn.Module, outputs: Any, uses: Iterable[Any]) -> str | None:
    """The first parameter that no layer splits, and that the outputs are made of by way of shares and otherwise.

    Args:
        model: the model.
        outputs: of its forward, in any structure.
        uses: nodes of the graph by which whole tensors come to shares.
    """
    uses = set(uses)
    roots = [tensor.grad_fn for tensor in tensors_in(outputs)]
    otherwise, _ = _below(roots, lambda node: node in uses)
    # What comes to a share from a layer is a share itself, if one that does not know it.
    on_shares, _ = _below(uses, _of_a_layer)
    both = otherwise & on_shares
    for name, parameter in model.named_parameters():
        if id(parameter) in both and not hasattr(parameter, "axonn_layout"):
            return name
    return None


def _of_a_layer(node: Any) -> bool:
    """True if one of our functions made what the node stands for."""
    return getattr(getattr(type(node), "_forward_cls", None), "__module__", "").startswith("axonn_tp.")


def _below(roots: Iterable[Any], ends: Callable[[Any], bool]) -> tuple[set[int], set[Any]]:
    """Tensors that were made of no other, by id, and nodes, which nodes are made of; what `ends` names is left out, unless it is a root."""
    found: set[int] = set()
    waiting = [root for root in roots if root is not None]
    seen: set[Any] = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(id(leaf))
        for after, _ in node.next_functions:
            if after is not None and after not in seen and not ends(after):
                seen.add(after)
                waiting.append(after)
    return found, seen
