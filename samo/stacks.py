"""Parameters that are stacks of matrices, as a layer's experts are: each matrix is pruned by itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from samo.selection import Shard, Shards


def stacks_of(model: object, shards: Shards | None = None) -> set[Tensor]:
    """The parameters of three dims that are not those of convolutions; none of what is no module."""
    found: set[Tensor] = set()
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if not isinstance(module, _ConvNd):
            for name, parameter in module.named_parameters(recurse=False):
                dims = parameter.dim() if shards is None else len(shards.find(name, parameter).shape)
                if dims == 3:
                    found.add(parameter)
    return found


class Matrices:
    """Parameters with the matrices of stacks one by one, as ``name[number]``.

    Args:
        parameters: by name.
        shards: of a model whose parts are on several ranks.
        stacks: those of the parameters that are stacks.

    Attributes:
        parameters: by name, matrices of stacks as vectors that share their memory.
        shards: how these lie.
    """

    def __init__(self, parameters: Mapping[str, Tensor], shards: Shards | None, stacks: Collection[Tensor]) -> None:
        self._whole = parameters
        self._ranges: dict[str, dict[str, tuple[int, int]]] = {}
        find: dict[str, Shard] = {}
        for name, parameter in parameters.items():
            if parameter in stacks:
                shard = Shard(tuple(parameter.shape)) if shards is None else shards.find(name, parameter)
                self._ranges[name], found = _matrices(name, shard)
                find |= found
        self.parameters = self.split(parameters)
        self.shards = shards
        if shards is not None and find:
            old = shards.find
            self.shards = replace(shards, find=lambda name, part: find[name] if name in find else old(name, part))

    def split(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the parameters' shapes, by name, as `parameters` are."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if name in self._ranges:
                flat = tensor.detach().reshape(-1)
                found |= {one: flat[begin:end] for one, (begin, end) in self._ranges[name].items()}
            else:
                found[name] = tensor
        return found

    def joined(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Masks of `parameters` as those of the stacks."""
        found = {}
        for name, parameter in self._whole.items():
            if name in self._ranges:
                mask = torch.zeros(parameter.numel(), dtype=torch.bool, device=parameter.device)
                for one, (begin, end) in self._ranges[name].items():
                    mask[begin:end] |= masks[one]
                found[name] = mask.view(parameter.shape)
            else:
                found[name] = masks[name]
        return found


def _matrices(name: str, shard: Shard) -> tuple[dict[str, tuple[int, int]], dict[str, Shard]]:
    """Where each matrix of a stack begins and ends in this rank's part, and what of it is there."""
    count, size = shard.shape[0], shard.numel // max(shard.shape[0], 1)
    names = [f"{name}[{number}]" for number in range(count)]
    if shard.positions is None:
        ranges = {one: (number * size, (number + 1) * size) for number, one in enumerate(names)}
        return ranges, {one: Shard(shard.shape[1:]) for one in names}
    where, ranges = shard.positions().reshape(-1), dict[str, tuple[int, int]]()
    found: dict[str, Shard] = {}
    matrix = where.div(size, rounding_mode="floor")
    for number, one in enumerate(names):
        mine = (matrix == number).nonzero().reshape(-1)
        begin, end = (int(mine[0]), int(mine[-1]) + 1) if mine.numel() else (0, 0)
        ranges[one] = begin, end
        found[one] = Shard(shard.shape[1:], shard.copies, _within(shard, number * size, size, begin, end))
    return ranges, found


def _within(shard: Shard, first: int, size: int, begin: int, end: int) -> Callable[[], Tensor]:
    def positions() -> Tensor:
        assert shard.positions is not None
        found = shard.positions().reshape(-1)[begin:end] - first
        return found.masked_fill_((found < 0) | (found >= size), -1)

    return positions
