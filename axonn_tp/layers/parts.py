"""A part of a split model that a script calls by itself: `model.encoder(x)`, `model.backbone(ids)`, a layer.

Within the model's forward parts hand each other shares. By itself a part gives what it gives in one process, whole on every rank, or is refused; and what
it gave is taken for the share that it was where another part, or the model, is given it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from axonn_tp.comm.collectives import gather_from, split_to
from axonn_tp.comm.overlap import Gathers, in_backward
from axonn_tp.comm.same_on_replicas import SameOnReplicas
from axonn_tp.grid.leaves import tensors_in
from axonn_tp.grid.mesh import Mesh
from axonn_tp.layers.activation import ActivationSplit, plain, split_among, split_of
from axonn_tp.layers.as_share import own
from axonn_tp.layers.boundary import whole_outputs
from axonn_tp.layers.exports import refuse_changed
from axonn_tp.layers.features import following
from axonn_tp.layers.product import filled
from axonn_tp.layers.shared_uses import SharedUses
from axonn_tp.layers.tokens import REMEDY
from axonn_tp.layers.weight import Split, SplitWeight


class Forward(Protocol):
    """The state that the hooks of a model and of its parts share."""

    running: int
    mesh: Mesh
    uses: SharedUses
    same: SameOnReplicas


@dataclass
class _Part:
    """A part of a model, or of several that share it.

    Attributes:
        forwards: of the models, the last one the newest.
        name: its name in the model.
        published: it is a model itself, of HF's.
        calls: that are under way, each with the end of what it began where it is by itself.
        alone: its last call was by itself.
    """

    forwards: list[Forward]
    name: str
    published: bool
    calls: list[ExitStack | None] = field(default_factory=list)
    alone: bool = False


def watch_parts(model: nn.Module, forward: Forward, before: Forward | None, published: Collection[int]) -> None:
    """Have the parts of a model that hold split layers, or are such, give whole outputs where they are called by themselves.

    Args:
        model: the model.
        forward: its state.
        before: its state till now, if it has been split before.
        published: ids of modules that are models of HF's.
    """
    if forward.mesh.size("model") == 1 and forward.mesh.size("z") == 1:
        return
    for name, part in model.named_modules():
        if part is model or not any(isinstance(inner, Split) for inner in part.modules()):
            continue
        known: _Part | None = vars(part).get("axonn_part")
        others = [one for one in known.forwards if one is not before] if known is not None else []
        part.axonn_part = _Part([*others, forward], name, id(part) in published)  # type: ignore[assignment]
        if known is None:
            part.register_forward_pre_hook(_enter, prepend=True, with_kwargs=True)
            part.register_forward_hook(_leave, always_call=True)


def _enter(part: nn.Module, inputs: tuple, keywords: dict[str, Any]) -> Any:
    state: _Part = part.axonn_part  # type: ignore[assignment]
    alone = not any(forward.running for forward in state.forwards)
    # A recomputation goes the way of the first call.
    alone = alone and (state.alone or not in_backward())
    for forward in state.forwards:
        forward.running += 1
    state.alone = alone
    state.calls.append(None)
    if not alone:
        return None
    gathers = {module.gathers for module in part.modules() if isinstance(module, SplitWeight)}
    state.calls[-1] = stack = ExitStack()
    stack.enter_context(following())
    for each in gathers:
        each.parts += 1
        stack.callback(_end, each)
    refuse_changed()
    refuse_transforms(gathers)
    forward, given = state.forwards[-1], (inputs, keywords)
    if torch.is_grad_enabled() and not in_backward():
        if part.training:
            forward.same.begin(given)
        if part.training or any(tensor.requires_grad for tensor in tensors_in(given)):
            forward.uses.begin(given)
    return shared_again(given, forward)


def _end(gathers: Gathers) -> None:
    gathers.parts -= 1


def _leave(part: nn.Module, inputs: tuple, output: Any) -> Any:
    state: _Part = part.axonn_part  # type: ignore[assignment]
    if not state.calls:  # another hook ended the call before it began here
        return None
    for forward in state.forwards:
        forward.running -= 1
    stack, forward = state.calls.pop(), state.forwards[-1]
    if stack is None:
        return None
    stack.close()
    if not in_backward():
        forward.uses.end(part, output)
    if not any(split_of(tensor) is not None for tensor in tensors_in(output)):
        return None
    output = tree_map(lambda one: _whole(one, state), output)
    if state.published:
        output = whole_outputs(output, forward.mesh)
    for left in tensors_in(output):
        if split_of(left) is not None:
            raise ValueError(
                f"{state.name} was called by itself and gives a share of an activation, of shape {tuple(left.shape)}, which the plan splits over "
                f"{' and '.join(split_of(left).over)}, in a way that is not known behind this code; call the model, whose outputs are whole, and have it "  # type: ignore[union-attr]
                "return this, or leave the layers around it out of the plan, which makes them self_contained"
            )
    return output


@dataclass(frozen=True)
class _Given:
    """A tensor that a part gave whole, as it is split within its models: whose, its shape, its split, and a share's shape."""

    forwards: tuple[Forward, ...]
    whole: torch.Size
    split: ActivationSplit
    share: torch.Size


_given: MutableMapping[Tensor, _Given] = WeakTensorKeyDictionary()


def _whole(given: Any, state: _Part) -> Any:
    """All of an activation, or itself where it is not known how it lies."""
    split = split_of(given) if isinstance(given, Tensor) else None
    if split is None:
        return given
    mesh, features, tokens = state.forwards[-1].mesh, split.features, split.tokens
    scattered = tokens is not None and tokens.ranks > 1
    known = {axis for axis in (features.axes if features else ()) if mesh.size(axis) > 1}
    known |= {"x"} if scattered else set()
    if known != {*split.over} or (scattered and features is not None and features.dim != -1):
        return given
    rows = plain(given)
    if scattered:
        rows = tokens.unflatten(rows)  # type: ignore[union-attr]
    flat = rows.dim() > given.dim()
    rows = rows if features is None else features.gather(rows, mesh)
    if scattered:
        rows = gather_from(rows.contiguous(), mesh, "x", -2)[..., : tokens.whole, :]  # type: ignore[union-attr]
    if flat:
        return rows.flatten(0, -2)
    _given[rows] = _Given(tuple(state.forwards), rows.shape, split, given.shape)
    return rows


def shared_again(given: tuple[tuple, dict[str, Any]], forward: Forward) -> tuple[tuple, dict[str, Any]] | None:
    """Arguments of a forward in which what a part of its model gave whole is this rank's share again; None where nothing is."""
    if not _given or not any(isinstance(one, Tensor) and one in _given for one in tree_leaves(given)):
        return None
    return tree_map(lambda one: _share(one, forward), given)


def _share(whole: Any, forward: Forward) -> Any:
    note = _given.get(whole) if isinstance(whole, Tensor) else None
    if note is None or forward not in note.forwards or note.whole != whole.shape:
        return whole
    mesh, split, share = forward.mesh, note.split, whole
    tokens, features = split.tokens, split.features
    if tokens is not None and tokens.ranks > 1:
        share = split_to(filled(share, -2, tokens.ranks), mesh, "x", -2)
    if features is not None:
        share = features.split(share, mesh, note.share[features.dim])
    return split_among(share, mesh, split.over, tokens, split.classes, features)


def refuse_whole_tokens(norm: nn.Module, inputs: tuple) -> None:
    """Refuse rows that are whole on every rank of x in a norm of scattered tokens, whose gradients are summed over x: a hook.

    Raises:
        ValueError: such gradients would be gx times too large.
    """
    split = split_of(own(inputs[0])) if inputs else None
    if torch.is_grad_enabled() and inputs and (split is None or split.tokens is None or split.tokens.ranks == 1):
        raise ValueError(
            f"{norm}: an input of shape {tuple(inputs[0].shape)} does not tell of how many tokens it is a share, where the plan scatters tokens over x; "
            f"call the norm in the model's forward, or with what the part before it gave, or {REMEDY}"
        )


def refuse_transforms(gathers: Iterable[Gathers]) -> None:
    """Refuse torch.func's transforms, which no collective knows.

    Raises:
        ValueError: one is under way.
    """
    stack = torch._C._functorch.peek_interpreter_stack()
    if stack is not None and any(each.mesh.size("model") * each.mesh.size("z") > 1 for each in gathers):
        raise ValueError(
            f"torch.func ({stack.key().name.lower()}) transforms a model that is split over ranks, whose layers communicate, which it cannot; use "
            "torch.autograd.grad, with create_graph=True for gradients of gradients, and for each sample a pass of its own"
        )
