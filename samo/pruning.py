"""Masks of a pruned network: by magnitude, or from a file. A mask is true where an element is kept."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from samo.mask_file import read_masks as read_masks
from samo.mask_file import write_masks as write_masks
from samo.selection import Magnitudes
from samo.selection import Shard as Shard
from samo.selection import Shards as Shards
from samo.stacks import Matrices, stacks_of
from samo.targets import Parameters, names_of, require_values, targets

SCARCE = 0.1
"""Matrices that keep less than this times the share that is kept of all are named in a warning."""


@torch.no_grad()
def magnitude(
    model: Parameters,
    sparsity: float,
    scope: str = "layer",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    *,
    shards: Shards | None = None,
    stacks: Collection[Tensor] | None = None,
) -> dict[str, Tensor]:
    """Prune the weights with the smallest magnitudes: exactly round(sparsity · n) of n.

    Of equal magnitudes the first go: by parameter, then by position. So masks are the same from run to run, and the same on
    any number of ranks. A warning names matrices of which less than a tenth of the share kept of all is kept.

    Args:
        model: a module, or pairs of name and parameter.
        sparsity: which share to prune, 0 to 1.
        scope: "layer": the smallest of each parameter by itself, of which at least one element stays; "global": of all together,
            which can take small-valued layers away whole, such as GPT-2's attention outputs as they are initialised.
        include: see `samo.targets.targets`, which says which parameters are pruned by default.
        exclude: see there.
        shards: where each rank holds a part of the model: how. Masks are those of the parts; padding is pruned.
        stacks: which parameters are stacks of matrices, such as experts, each of which is a parameter by itself. By default a
            module's parameters of three dims that are not of convolutions.

    Returns:
        By name, boolean, of the parameter's shape and device.

    Raises:
        ValueError: an argument that is not allowed; a weight is NaN; nothing of a parameter would be kept.
    """
    require_scope(sparsity, scope)
    parameters = chosen(model, include, exclude, shards)
    require_values(parameters)
    return select(parameters, None, sparsity, scope, shards, stacks_of(model, shards) if stacks is None else stacks)


def select(
    parameters: Mapping[str, Tensor],
    scores: Mapping[str, Tensor] | None,
    sparsity: float,
    scope: str,
    shards: Shards | None,
    stacks: Collection[Tensor],
) -> dict[str, Tensor]:
    """Masks without the smallest scores, or magnitudes where there are none; see `magnitude`."""
    matrices = Matrices(parameters, shards, stacks)
    found = Magnitudes(matrices.parameters, matrices.shards, None if scores is None else matrices.split(scores))
    masks = smallest(found, sparsity, scope)
    if scores is None and found.undecided:
        warnings.warn(
            f"samo: all magnitudes are equal in {_listed([repr(name) for name in found.undecided])}, as of a layer that begins with zeros, so that they do not "
            "say which to prune and its first rows went; prune once it has learned (start_step), or exclude it",
            stacklevel=3,
        )
    require_alive(found, masks, sparsity, scope)
    return matrices.joined(masks)


def chosen(
    model: Parameters, include: Sequence[str] | None, exclude: Sequence[str] | None, shards: Shards | None
) -> dict[str, Tensor]:
    """The parameters that `magnitude` prunes, by name; its arguments."""
    shapes = None
    if shards is not None:
        shapes = {name: shards.find(name, parameter).shape for name, parameter in names_of(model)[0].items()}
    return targets(model, include, exclude, shapes)


def smallest(found: Magnitudes, sparsity: float, scope: str) -> dict[str, Tensor]:
    """Masks without the smallest of these; see `magnitude`."""
    if scope == "global":
        return found.keep([(found.names, round(sparsity * sum(found.sizes.values())))])
    return found.keep([([name], pruned_of(found.sizes[name], sparsity)) for name in found.names])


def pruned_of(size: int, sparsity: float) -> int:
    """Number of elements that are pruned of a parameter by itself: one stays below a sparsity of 1."""
    count = round(sparsity * size)
    return min(count, size - 1) if size and sparsity < 1 else count


def require_alive(found: Magnitudes, masks: Mapping[str, Tensor], sparsity: float, scope: str) -> None:
    """Refuse masks that take a parameter away whole, and warn of those that nearly do.

    Raises:
        ValueError: one does; on all ranks.
    """
    kept = found.kept(masks)
    dead = [name for name in found.names if found.sizes[name] and not kept[name]]
    if dead:
        advice = (
            "use scope = 'layer', which keeps the same share of each" if scope == "global" else "use a lower sparsity"
        )
        raise ValueError(
            f"sparsity = {sparsity} with scope = {scope!r} keeps nothing of {_listed([repr(name) for name in dead])}; {advice}, or exclude "
            "what is not to be pruned"
        )
    least = SCARCE * (1 - sparsity)
    scarce = [name for name in found.names if kept[name] < min(least * found.sizes[name], found.sizes[name] - 1)]
    if scarce:
        shares = [f"{name!r} ({kept[name] / found.sizes[name]:.3%})" for name in scarce]
        warnings.warn(
            f"samo: sparsity = {sparsity} with scope = {scope!r} keeps less than {least:.2%} of {_listed(shares)}; scope = 'layer' "
            "keeps the same share of each",
            stacklevel=3,
        )


def _listed(names: Sequence[str]) -> str:
    few = ", ".join(names[:4])
    return few if len(names) <= 4 else f"{few} and {len(names) - 4} more"


def sparsity_table(masks: Mapping[str, Tensor], model: Parameters) -> str:
    """Lines to print of the elements that masks keep, by layer.

    Args:
        masks: by parameter name.
        model: a module, or pairs of name and parameter; with a part of a model, the figures are this part's.
    """
    parameters, aliases = names_of(model)
    rows = [
        (name, tuple(parameters[aliases[name]].shape), int(mask.sum()), mask.numel()) for name, mask in masks.items()
    ]
    kept, size = sum(row[2] for row in rows), sum(row[3] for row in rows)
    whole = sum(parameter.numel() for parameter in parameters.values())
    cells = [("parameter", "shape", "kept", "of", "sparsity")]
    for label, shape, some, full in [
        *rows,
        ("pruned layers", (), kept, size),
        ("model", (), whole - size + kept, whole),
    ]:
        share = f"{1 - some / full:.2%}" if full else "-"
        cells.append((label, "x".join(str(n) for n in shape), f"{some:,}", f"{full:,}", share))
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    return "\n".join(
        "  ".join(
            [
                row[0].ljust(widths[0]),
                row[1].ljust(widths[1]),
                *(c.rjust(w) for c, w in zip(row[2:], widths[2:], strict=True)),
            ]
        ).rstrip()
        for row in cells
    )


def require_sparsity(sparsity: float) -> None:
    """Refuse what is no share.

    Raises:
        ValueError: it is not a number from 0 to 1.
    """
    number = isinstance(sparsity, (int, float)) and not isinstance(sparsity, bool)
    if not number or not 0 <= sparsity <= 1:
        raise ValueError(
            f"sparsity = {sparsity!r} is not a share of weights to prune; use a number from 0 to 1, such as 0.9"
        )


def require_scope(sparsity: float, scope: str) -> None:
    """Refuse what is no share, or no scope.

    Raises:
        ValueError: either is not allowed.
    """
    require_sparsity(sparsity)
    if scope not in ("global", "layer"):
        raise ValueError(f"scope = {scope!r} is not a scope of pruning; use 'global' or 'layer'")
