"""A module in a split stream that needs whole activations, the same on all ranks of x and y, and gives such: a mixture of experts."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import Tensor

from axonn_tp.comm.collectives import gather_from, split_to
from axonn_tp.grid.mesh import Mesh
from axonn_tp.layers.activation import plain, split_as, split_of, unwatched
from axonn_tp.layers.product import filled
from axonn_tp.layers.tokens import Tokens


def whole_activation(share: Tensor, mesh: Mesh, features: int) -> Tensor:
    """All features of all tokens; the gradient, which is whole on every rank, is split again.

    Args:
        share: what came: whole, or features split over y, tokens scattered over x, or both.
        mesh: the mesh of the layers before.
        features: how many there are.

    Raises:
        ValueError: it is something else.
    """
    split, shape = split_of(share), tuple(share.shape)
    rows = plain(share)
    if split is not None:
        tokens = _scattered(share)
        if "x" in split.over and tokens is None:
            raise ValueError(
                f"an activation of shape {shape} has its features split over x, as between the layers of a pair, and is to be whole; make "
                "the layer before it transposed or self_contained in the plan"
            )
        rows = rows if tokens is None else tokens.unflatten(rows)
        if "y" in split.over:
            rows = gather_from(rows, mesh, "y", -1)
        if tokens is not None:
            rows = gather_from(rows, mesh, "x", -2)[..., : tokens.whole, :]
    if rows.shape[-1] != features:
        raise ValueError(
            f"an activation of shape {shape} has {rows.shape[-1]} features on all ranks together, expected {features}; correct the plan of "
            "the layers before it"
        )
    return rows


def share_again(whole: Tensor, share: Tensor, mesh: Mesh) -> Tensor:
    """Split a tensor that is whole on every rank as an activation of the same shape was before `whole_activation`."""
    split = split_of(share)
    if split is None:
        return whole
    tokens = _scattered(share)
    with unwatched():
        if tokens is not None:
            whole = split_to(filled(whole, -2, tokens.ranks), mesh, "x", -2)
        if "y" in split.over:
            whole = split_to(whole, mesh, "y", -1)
        return split_as(whole.reshape(share.shape), share)


def make_states_whole(outputs: Any, mesh: Mesh) -> None:
    """Make hidden states and attentions that a model gives by name whole, in place, as its logits are.

    Args:
        outputs: of a model's forward; a mapping, as HF's are, or something else, which stays as it is.
        mesh: the mesh.
    """
    if isinstance(outputs, MutableMapping):
        for name, given in list(outputs.items()):
            states = isinstance(name, str) and name.endswith(("hidden_states", "hidden_state", "attentions"))
            tensors = given if isinstance(given, tuple) else (given,)
            if states and any(isinstance(one, Tensor) and split_of(one) is not None for one in tensors):
                made = tuple(_whole_state(one, mesh, name.endswith("attentions")) for one in tensors)
                outputs[name] = made if isinstance(given, tuple) else made[0]


def whole_outputs(outputs: Any, mesh: Mesh) -> Any:
    """Outputs of a model that is a part of another one, as HF's, whole where states and attentions, by name or place, are shares.

    Args:
        outputs: of its forward; a mapping changes in place.
        mesh: the mesh.
    """
    make_states_whole(outputs, mesh)
    return whole_states(outputs, mesh) if type(outputs) is tuple else outputs


def whole_states(outputs: tuple, mesh: Mesh) -> tuple:
    """The same as `make_states_whole` of a tuple, in which states and attentions have no names; tuples of them may be in it."""

    def whole(given: Any) -> Any:
        return _whole_state(given, mesh, given.dim() == 4) if isinstance(given, Tensor) else given

    return tuple(tuple(map(whole, one)) if type(one) is tuple else whole(one) for one in outputs)


def _noted(whole: Tensor) -> Tensor:
    whole.axonn_gathered = True  # type: ignore[attr-defined]
    return whole


def _whole_state(share: Any, mesh: Mesh, of_heads: bool) -> Any:
    """The whole of (samples, tokens, features), or of (samples, heads, ...); what is neither stays a share, of which no loss can be made."""
    split = split_of(share) if isinstance(share, Tensor) else None
    if split is None:
        return share
    if of_heads and share.dim() == 4 and split.tokens is None:
        rows = plain(share)
        for axis in ("y", "x"):  # a rank's heads are a part of those of its x
            rows = gather_from(rows, mesh, axis, 1) if axis in split.over else rows
        return rows
    stream = not of_heads and share.dim() == 3 and ("x" not in split.over or _scattered(share) is not None)
    ranks = mesh.size("y") if "y" in split.over else 1
    return _noted(whole_activation(share, mesh, share.shape[-1] * ranks)) if stream else share


def _scattered(share: Tensor) -> Tokens | None:
    """The place of its tokens where they are scattered over x; None where they are not."""
    split = split_of(share)
    return None if split is None or split.tokens is None or split.tokens.ranks == 1 else split.tokens
