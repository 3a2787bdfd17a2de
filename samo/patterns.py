"""N:M masks: of each m consecutive inputs n are kept. Of a model whose parts are on several ranks, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from samo.pruning import chosen
from samo.selection import Shard, Shards
from samo.targets import Parameters, require_values


@torch.no_grad()
def n_of_m(
    model: Parameters,
    n: int,
    m: int,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    *,
    shards: Shards | None = None,
    inputs: Mapping[Tensor, int] | None = None,
) -> dict[str, Tensor]:
    """Keep the `n` largest of each `m` consecutive input features: `n_of_m(model, 2, 4)` is what sparse tensor cores take.

    Groups lie along dim 1, the inputs of linears and convolutions; along dim 0 for transposed convolutions and HF's Conv1D,
    where the model is a module. A short last group keeps at most `n`. Of equal magnitudes the first go. Ranks put one parameter
    at a time together, as a group may lie on several of them.

    Args:
        model: a module, or pairs of name and parameter.
        n: kept of a group.
        m: size of a group.
        include: see `samo.targets.targets`.
        exclude: see there.
        shards: see `samo.magnitude`.
        inputs: of parameters given as pairs, what `input_dims` says of their model.

    Returns:
        By name, boolean, of the parameter's shape and device.

    Raises:
        ValueError: an argument that is not allowed; a weight is NaN; several matrices in one parameter, whose inputs nobody knows.
    """
    if not (isinstance(n, int) and isinstance(m, int) and 1 <= n <= m):
        raise ValueError(f"n = {n}, m = {m} is not a pattern; keep n of each m with 1 <= n <= m, such as 2 of 4")
    parameters = chosen(model, include, exclude, shards)
    require_values(parameters)
    known = dict(inputs or {})
    if isinstance(model, nn.Module):
        known |= input_dims(model, shards)
    masks, problem = {}, None
    for name, shard, whole in wholes(parameters, shards):
        dim = -1 if shard is None else known.get(parameters[name], shard.inputs)
        if shard is not None and dim >= 0:
            masks[name] = shard.part_of(_groups(whole, n, m, dim))
        elif shard is not None and problem is None:
            # Raised at the end: other ranks may not have it, and go on.
            problem = f"{name!r} of {tuple(whole.shape)} is no layer's whose inputs are known, and N:M groups lie along them; exclude it"
    if problem is not None:
        raise ValueError(problem)
    return masks


def input_dims(model: nn.Module, shards: Shards | None = None) -> dict[Tensor, int]:
    """For each parameter the dim along which its layer's inputs lie, where it is not 1; −1: nobody knows."""
    found: dict[Tensor, int] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            dims = parameter.dim() if shards is None else len(shards.find(name, parameter).shape)
            if isinstance(module, _ConvTransposeNd) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf")):
                found[parameter] = 0
            elif dims > 2 and not isinstance(module, _ConvNd):
                # transformers says so of stacks of experts' matrices.
                stored = getattr(module, "is_transposed", None)
                found[parameter] = -1 if stored is None or dims > 3 else 1 if stored else 2
    return found


def wholes(parameters: Mapping[str, Tensor], shards: Shards | None) -> Iterator[tuple[str, Shard | None, Tensor]]:
    """Magnitudes of whole parameters, one at a time; where parts are on several ranks each goes through all of them.

    Yields:
        The name, this rank's shard, None where it has none, and magnitudes of the whole's shape.

    Raises:
        ValueError: a weight is NaN or infinite, on any rank.
    """
    if shards is None:
        for name, parameter in parameters.items():
            yield name, Shard(tuple(parameter.shape)), _finite(name, parameter.abs())
        return
    mine = {name: shards.find(name, parameter) for name, parameter in parameters.items()}
    facts = {name: (shard.shape, parameters[name].dtype) for name, shard in mine.items()}
    everyone: list[Any] = [None] * dist.get_world_size(shards.group)
    dist.all_gather_object(everyone, facts, group=shards.group)
    here = (parameter.device for parameter in parameters.values())
    device = next(here, shards.device or torch.device("cpu"))  # a stage may have nothing to prune
    for name, (shape, kind) in {name: fact for one in everyone for name, fact in one.items()}.items():
        kind = torch.promote_types(kind, torch.float32)
        whole = torch.zeros(shape, dtype=kind, device=device)
        if name in mine:
            whole = mine[name].whole_of(parameters[name].detach().to(kind)).abs().contiguous()
        # A NaN must not be lost to a maximum.
        whole.masked_fill_(whole.isnan(), torch.inf)
        dist.all_reduce(whole, dist.ReduceOp.MAX, group=shards.group)
        yield name, mine.get(name), _finite(name, whole)


def _finite(name: str, magnitudes: Tensor) -> Tensor:
    if not bool(magnitudes.isfinite().all()):
        raise ValueError(
            f"{name!r} holds NaN or infinity, and NaN has no magnitude; prune a model that has not diverged"
        )
    return magnitudes


def _groups(magnitudes: Tensor, n: int, m: int, dim: int) -> Tensor:
    rows = magnitudes.movedim(dim, -1)
    length = rows.shape[-1]
    # What fills the last group up is smaller than all, so that it is the first of the m - n to go.
    filled = nn.functional.pad(rows, (0, -length % m), value=-1.0)
    order = filled.unflatten(-1, (-1, m)).argsort(dim=-1, stable=True)
    mask = torch.ones_like(order, dtype=torch.bool).scatter_(-1, order[..., : m - n], False)
    return mask.flatten(-2)[..., :length].movedim(-1, dim).contiguous()
