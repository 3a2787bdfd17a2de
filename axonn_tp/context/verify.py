"""Does a model compute on shares of tokens what it computes on all of them? What looks across tokens unseen is named."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from axonn_tp.context.calls import Call, main_input, padded_in_front
from axonn_tp.context.shared import AXIS
from axonn_tp.context.sums import noting_targets, real_targets
from axonn_tp.grid.mesh import Mesh
from axonn_tp.plan.evaluating import evaluating

_MOST = 128
"""Tokens of a sequence that are looked at."""
_UNNAMED = "its output or its loss differs"
_SEEN = (
    "computes something else on a share of the tokens: {}; attention is seen where it goes through F.scaled_dot_product_attention or HF's attention "
    "interface, places of tokens as position_ids or torch.arange(tokens), and a loss as F.cross_entropy in the model's forward, or outside of it"
)


class Runs(Protocol):
    """Runs the model."""

    mesh: Mesh
    how: str | None
    now: Call | None
    defaults: dict[str, Any]
    aside: Callable[[], AbstractContextManager]

    def run(self, model: nn.Module, forward: Callable, inputs: tuple, keywords: dict[str, Any]) -> Any:
        """Run the model on this rank's shares of the tokens."""

    def whole(self, forward: Callable, model: nn.Module, inputs: tuple, keywords: dict[str, Any]) -> Any:
        """Run the model on all tokens."""

    def forget(self) -> None:
        """Let the next call be the first."""


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        with evaluating(model):
            yield
    finally:
        torch.set_rng_state(state)


class _Losses(TorchFunctionMode):
    """Has the targets of losses noted where nothing is replaced."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is F.cross_entropy:
            target = args[1] if len(args) > 1 else (kwargs or {})["target"]
            if not target.is_floating_point():
                real_targets(target, 0)
        return function(*args, **(kwargs or {}))


Seen = tuple[list[tuple[str, Tensor]], list[Tensor], list[Tensor]]


def _outputs(model: nn.Module, run: Callable[[], Any]) -> Seen:
    """Outputs of each module in order, those of the model, and targets of its losses."""
    seen: list[tuple[str, Tensor]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
            if first is not None and first.is_floating_point():
                seen.append((f"{name} ({type(module).__name__})", first.detach().clone()))

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    try:
        with noting_targets() as targets:
            given = [leaf for leaf in tree_leaves(run()) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    finally:
        for handle in handles:
            handle.remove()
    return seen, given, targets


@torch.no_grad()
def verify(
    runs: Runs, model: nn.Module, forward: Callable, inputs: tuple, keywords: dict[str, Any], names: list[str]
) -> None:
    """Run the beginning of a batch on shares and whole; all ranks that gather weights together call it.

    Raises:
        ValueError: they differ: names the first module that does, on all of these ranks.
    """
    arguments = dict(zip(names, inputs, strict=False)) | keywords
    main = main_input(arguments)
    assert main is not None
    tokens, mask = main.shape[1], arguments.get("attention_mask")
    ranks = runs.mesh.size(AXIS)
    fewer = min(tokens, max(_MOST, 8 * ranks) - bool(tokens % (2 * ranks)))
    first = 0
    if isinstance(mask, Tensor) and mask.shape == main.shape[:2]:
        front = padded_in_front(mask)
        first = 0 if front is None else min(max(front - fewer // 2, 0), tokens - fewer)
        mask = mask[:, first : first + fewer].bool()
    whole_call = Call.of(main, runs.mesh, runs.how)

    def shorter(value: Any) -> Any:
        dim = whole_call.token_dim(value.shape, tokens) if isinstance(value, Tensor) else None
        return value if dim is None else value.narrow(dim, first, fewer)

    inputs, keywords = tree_map(shorter, (inputs, keywords))
    given: list[Tensor] = []
    with _evaluating(model), runs.aside():
        problem = None
        try:
            shares, given, targets = _outputs(model, lambda: runs.run(model, forward, inputs, keywords))
        except (ValueError, RuntimeError, IndexError, TypeError) as error:
            problem = str(error).partition("\n")[0]
        call = runs.now
        if problem is None and call is not None:
            with _Losses():
                wholes, expected, all_targets = _outputs(
                    model, lambda: runs.whole(forward, model, inputs, keywords | runs.defaults)
                )
            apart = _apart(call, shares, wholes, given, expected, mask if isinstance(mask, Tensor) else None)
            apart = apart or _targets_apart(call, targets, all_targets)
            problem = apart and _SEEN.format(apart)
    runs.forget()
    own = _losses_apart(given, runs.mesh)
    told: str | None = problem or (own and _SEEN.format(own))
    for axis in ("z", "model"):
        everyone: list[str | None] = [None] * runs.mesh.size(axis)
        dist.all_gather_object(everyone, told, group=runs.mesh.group(axis))
        # One that names a module comes first.
        told = next((one for one in sorted(filter(None, everyone), key=lambda one: _UNNAMED in one)), None)
    if told:
        raise ValueError(f"{type(model).__name__} cannot share sequences over {ranks} ranks of z: it {told}")


def _targets_apart(call: Call, shares: list[Tensor], wholes: list[Tensor]) -> str:
    """In words, if a loss on shares has other targets than on all tokens has at these places."""
    real = call.shared.places(call.places.device) < call.tokens
    places = call.places[real]
    for share, whole in zip(shares, wholes, strict=False):
        lost = call.batch * call.tokens - whole.numel()
        if not lost and share.numel() == call.rows:
            by_sample = share.reshape(call.batch, -1)[:, real], whole.reshape(call.batch, -1)[:, places]
            by_token = share.reshape(-1, call.batch)[real], whole.reshape(-1, call.batch)[places]
            turned = not torch.equal(*by_sample) and torch.equal(*by_token)
            if turned and not real.all():
                return (
                    "the targets of a loss in its forward lie token by token, and which are the padding of a share is known where they lie sample by "
                    f"sample (have them so, or sequences of a multiple of {2 * call.mesh.size(AXIS)} tokens)"
                )
            cut = not (torch.equal(*by_sample) or turned)
        else:
            cut = 0 < lost == call.rows - share.numel() and lost % call.batch == 0
        if cut:
            return (
                "its forward shifts the targets of its loss on each share, where those at the ends are lost or others' (give it labels that are shifted, "
                "or compute the loss of its logits outside)"
            )
    return ""


def _losses_apart(given: list[Tensor], mesh: Mesh) -> str:
    """In words, if ranks that share sequences have other losses; all of them call it."""
    mine = [(one.item(), 4 * torch.finfo(one.dtype).eps) for one in given if not one.dim()]
    losses: list[list[tuple[float, float]]] = [mine] * mesh.size(AXIS)
    dist.all_gather_object(losses, mine, group=mesh.group(AXIS))
    pairs = [pair for some in losses for pair in zip(some, losses[0], strict=False)]
    alike = all(math.isclose(one, first, rel_tol=rounding) for (one, rounding), (first, _) in pairs)
    return "" if alike else "its loss is one of each rank's own tokens"


def _apart(
    call: Call,
    shares: list[tuple[str, Tensor]],
    wholes: list[tuple[str, Tensor]],
    given: list[Tensor],
    expected: list[Tensor],
    mask: Tensor | None,
) -> str:
    """Name the first layer whose outputs differ, and by how much, in words."""
    first, unclear, ends_alike = "", "", True
    rounding = _rounding([*(share for _, share in shares), *given])
    for (name, share), (other, whole) in zip(shares, wholes, strict=False):
        if name != other:
            break
        dim = next(
            (d for d, (a, b) in enumerate(zip(share.shape, whole.shape, strict=False)) if (a, b) == (call.share, call.tokens)),
            None,
        )  # fmt: skip
        if share.dim() != whole.dim() or dim is None or whole.numel() // call.tokens != share.numel() // call.share:
            unclear = unclear or name
            continue
        ends_alike = _same(share, whole.index_select(dim, call.places), call, dim, mask, rounding)
        if not ends_alike:
            # What gives another number of tokens came before.
            first = first or unclear or name
        unclear = ""
    # A loss alone says little: that of a model that is not trained yet hardly depends on what it computes.
    alike = ends_alike or any(one.dim() for one in expected)
    if (
        alike
        and len(given) == len(expected)
        and all(
            a.shape == b.shape and _same(a, b, None, 1, mask, rounding) for a, b in zip(given, expected, strict=True)
        )
    ):
        return ""
    return f"the output of {first} differs" if first else _UNNAMED


def _rounding(outputs: list[Tensor]) -> float:
    """The largest share by which outputs may differ, by the coarsest type among them and autocast's: others are computed of these."""
    kinds = {one.device.type for one in outputs}
    types = [torch.get_default_dtype(), *(one.dtype for one in outputs)]
    types += [torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)]
    return {8: 1e-8, 4: 1e-3}.get(min(each.itemsize for each in types), 0.1)


def _same(got: Tensor, expected: Tensor, call: Call | None, dim: int, mask: Tensor | None, rounding: float) -> bool:
    got, expected = got.double(), expected.double()
    error = (got - expected).abs()
    if call is not None:
        real = call.shared.places(got.device) < call.tokens
        if mask is not None and dim == 1 and got.shape[0] == len(mask):
            valid = mask.index_select(1, call.places)
            error = error.masked_fill(~valid.view(*valid.shape, *[1] * (got.dim() - 2)), 0)
        error = error.index_select(dim, real.nonzero().flatten())
    elif mask is not None and got.shape[:2] == mask.shape:
        error = error.masked_fill(~mask.view(*mask.shape, *[1] * (got.dim() - 2)), 0)
    if not error.numel():
        return True
    return bool(error.max() <= rounding * (1e-6 + expected.abs().max()))
