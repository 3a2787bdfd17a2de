"""Whole output channels or attention heads pruned, by the norms of their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from samo.patterns import input_dims, wholes
from samo.pruning import chosen, pruned_of, require_sparsity
from samo.selection import Shard, Shards
from samo.targets import Parameters, require_values


@torch.no_grad()
def channels(
    model: Parameters,
    sparsity: float,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    *,
    shards: Shards | None = None,
    inputs: Mapping[Tensor, int] | None = None,
) -> dict[str, Tensor]:
    """Prune of each layer the output channels with the smallest 2-norms: round(sparsity · n) of n, of which at least one stays.

    Each layer goes by itself, as masks leave shapes and biases alone. Of equal norms the first go.

    Args:
        model: see `samo.n_of_m`, as for all but the sparsity.
        sparsity: which share of the channels is pruned, 0 to less than 1.
        include: see there.
        exclude: see there.
        shards: see there.
        inputs: see there; outputs are the other dim.

    Raises:
        ValueError: an argument that is not allowed; a weight is NaN; several matrices in one parameter, whose outputs nobody knows.
    """
    _require_some(sparsity)
    parameters = chosen(model, include, exclude, shards)
    require_values(parameters)
    known = _known(model, shards, inputs)
    masks, problem = {}, None
    for name, shard, whole in wholes(parameters, shards):
        if shard is None:
            continue
        dim = known.get(parameters[name], shard.inputs)
        if dim < 0:
            problem = problem or f"{name!r} of {tuple(whole.shape)} is no layer's whose outputs are known; exclude it"
            continue
        # Of a stack of matrices those of each.
        stacked = parameters[name] in known and dim > 0
        matrices = whole if stacked else whole[None]
        rows = matrices.movedim((3 - dim if stacked else 1 if dim else 2), 1)
        norms = rows.flatten(2).double().square().sum(2)
        mask = torch.stack([_largest(norm, sparsity) for norm in norms])
        full = mask.view(*mask.shape, *[1] * (rows.dim() - 2)).expand(rows.shape)
        full = full.movedim(1, (3 - dim if stacked else 1 if dim else 2))
        masks[name] = shard.part_of((full if stacked else full[0]).contiguous())
    # Raised here: other ranks may not have it, and go on.
    if problem is not None:
        raise ValueError(problem)
    return masks


@torch.no_grad()
def heads(
    model: Parameters,
    sparsity: float,
    count: int,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    shards: Shards | None = None,
    inputs: Mapping[Tensor, int] | None = None,
) -> dict[str, Tensor]:
    """Prune of each attention the heads with the smallest 2-norms over all of its layers: round(sparsity · count) of them.

    Args:
        model: see `samo.n_of_m`.
        sparsity: which share of the heads is pruned, 0 to less than 1; at least one stays.
        count: heads of an attention, one after the other in the features that are named.
        rows: patterns of the layers whose outputs are the heads', such as ``["*.q_proj.weight", "*.v_proj.weight"]``; those of one
            module lose the same heads. Keys and values that several heads share are no heads' own: leave them out.
        columns: patterns of the layers whose inputs are, such as ``["*.o_proj.weight"]``.
        shards: see there.
        inputs: see there.

    Raises:
        ValueError: an argument that is not allowed; a weight is NaN; features that heads do not divide.
    """
    _require_some(sparsity)
    if count < 1:
        raise ValueError(f"heads = {count} is not a number of heads; use 1 or more")
    parameters = chosen(model, [*rows, *columns], None, shards)
    require_values(parameters)
    return of_heads(parameters, sparsity, count, columns, shards, _known(model, shards, inputs))


def of_heads(
    parameters: Mapping[str, Tensor],
    sparsity: float,
    count: int,
    columns: Sequence[str],
    shards: Shards | None,
    known: Mapping[Tensor, int],
) -> dict[str, Tensor]:
    """Masks of parameters that all have to do with heads; see `heads`."""
    problem = None
    sums: dict[str, Tensor] = {}
    found: dict[str, tuple[Shard, int, int]] = {}
    inner = {}
    for name, shard, whole in wholes(parameters, shards):
        if shard is None:
            continue
        dim = known.get(parameters[name], shard.inputs)
        if whole.dim() != 2:
            problem = (
                problem or f"{name!r} of {tuple(whole.shape)} is no matrix, and has no heads; correct rows and columns"
            )
            continue
        takes = any(fnmatchcase(name, pattern) for pattern in columns)
        dim = dim if takes else 1 - dim
        size, rest = divmod(whole.shape[dim], count)
        if rest:
            problem = (
                problem
                or f"{name!r} has {whole.shape[dim]} features, which {count} heads do not divide; correct the number"
            )
            continue
        found[name] = shard, dim, size
        if takes:
            inner[_attention(name)] = name
        squares = whole.double().square().sum(1 - dim).view(count, size).sum(1)
        attention = _attention(name)
        sums[attention] = squares + sums.get(attention, 0)
    for name, (_, _, size) in found.items():
        whole_head = found[inner.get(_attention(name), name)][2]
        if size < whole_head:
            problem = problem or (
                f"{name!r} has {size} features for each of {count} heads, and {inner[_attention(name)]!r} has {whole_head}, so that several heads share "
                "its own; leave it out of rows"
            )
    if problem is not None:
        raise ValueError(problem)
    masks = {}
    for name, (shard, dim, size) in found.items():
        kept = _largest(sums[_attention(name)], sparsity).repeat_interleave(size)
        full = kept[:, None] if dim == 0 else kept[None]
        masks[name] = shard.part_of(full.expand(shard.shape).contiguous())
    return masks


def _require_some(sparsity: float) -> None:
    require_sparsity(sparsity)
    if sparsity == 1:
        raise ValueError(f"sparsity = {sparsity} keeps nothing of any layer; use a lower sparsity")


def _attention(name: str) -> str:
    """The module around the layer that has a parameter of this name."""
    return name.rpartition(".")[0].rpartition(".")[0]


def _known(model: Parameters, shards: Shards | None, inputs: Mapping[Tensor, int] | None) -> dict[Tensor, int]:
    return dict(inputs or {}) | (input_dims(model, shards) if isinstance(model, nn.Module) else {})


def _largest(norms: Tensor, sparsity: float) -> Tensor:
    """A mask without the smallest of a vector, of equal ones the first."""
    mask = torch.ones_like(norms, dtype=torch.bool)
    mask[norms.argsort(stable=True)[: pruned_of(norms.numel(), sparsity)]] = False
    return mask
