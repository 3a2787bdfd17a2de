"""Masks of a pruned network: by magnitude, N:M, or from a file. A mask is true where an element is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from samo.mask_file import read_masks as read_masks
from samo.mask_file import write_masks as write_masks
from samo.selection import Magnitudes
from samo.selection import Shard as Shard
from samo.selection import Shards as Shards
from samo.targets import Parameters, names_of, require_values, targets

_INPUT_FIRST = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@torch.no_grad()
def magnitude(
    model: Parameters,
    sparsity: float,
    scope: str = "global",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    *,
    shards: Shards | None = None,
) -> dict[str, Tensor]:
    """Prune the weights with the smallest magnitudes: exactly round(sparsity · n) of n.

    Of equal magnitudes the first go: by parameter, then by position. So masks are the same from run to run, and the same on
    any number of ranks.

    Args:
        model: a module, or pairs of name and parameter.
        sparsity: which share to prune, 0 to 1 inclusive.
        scope: "global": the smallest of all; "layer": of each parameter by itself.
        include: see `samo.targets.targets`, which says which parameters are pruned by default.
        exclude: see there.
        shards: where each rank holds a part of the model: how. Masks are those of the parts; padding is pruned.

    Returns:
        By name, boolean, of the parameter's shape and device.

    Raises:
        ValueError: an argument that is not allowed; a weight is NaN.
    """
    require_scope(sparsity, scope)
    parameters = chosen(model, include, exclude, shards)
    require_values(parameters)
    return smallest(Magnitudes(parameters, shards), sparsity, scope)


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
    masks: dict[str, Tensor] = {}
    for names in [found.names] if scope == "global" else [[name] for name in found.names]:
        masks |= found.keep(names, round(sparsity * sum(found.sizes[name] for name in names)))
    return masks


@torch.no_grad()
def n_of_m(
    model: Parameters,
    n: int,
    m: int,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """Keep the `n` largest of each `m` consecutive input features: `n_of_m(model, 2, 4)` is what sparse tensor cores take.

    Groups lie along dim 1, the inputs of linears and convolutions; along dim 0 for transposed convolutions and HF's Conv1D,
    where the model is a module. A short last group keeps at most `n`. Of equal magnitudes the first go.

    Args:
        model: a module, or pairs of name and parameter; each whole.
        n: kept of a group.
        m: size of a group.
        include: see `samo.targets.targets`.
        exclude: see there.

    Returns:
        By name, boolean, of the parameter's shape and device.

    Raises:
        ValueError: an argument that is not allowed; a weight is NaN.
    """
    if not (isinstance(n, int) and isinstance(m, int) and 0 <= n <= m and m >= 1):
        raise ValueError(
            f"n = {n}, m = {m} is not a pattern; keep n of each m with 0 <= n <= m and m at least 1, such as 2 of 4"
        )
    parameters = targets(model, include, exclude)
    require_values(parameters)
    masks = {}
    for name, parameter in parameters.items():
        if bool(parameter.isnan().any()):
            raise ValueError(f"{name!r} holds NaN, which has no magnitude; prune a model that has not diverged")
        dim = 0 if isinstance(model, nn.Module) and _input_first(model.get_submodule(name.rpartition(".")[0])) else 1
        masks[name] = _groups(parameter, n, m, dim)
    return masks


def _input_first(module: nn.Module) -> bool:
    return isinstance(module, _INPUT_FIRST) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def _groups(parameter: Tensor, n: int, m: int, dim: int) -> Tensor:
    rows = parameter.abs().movedim(dim, -1)
    length = rows.shape[-1]
    # What fills the last group up is smaller than all, so that it is the first of the m - n to go.
    filled = nn.functional.pad(rows, (0, -length % m), value=-1.0)
    order = filled.unflatten(-1, (-1, m)).argsort(dim=-1, stable=True)
    mask = torch.ones_like(order, dtype=torch.bool).scatter_(-1, order[..., : m - n], False)
    return mask.flatten(-2)[..., :length].movedim(-1, dim).contiguous()


def sparsity_table(masks: Mapping[str, Tensor], model: Parameters) -> str:
    """What masks keep, by layer, as lines to print.

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
