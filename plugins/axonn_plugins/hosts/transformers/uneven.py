"""Gathers and sums of readers that compute on parts of the last batch, of which some have fewer rows and some none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from axonn_plugins.hosts.transformers.last_batch import share

_COPIES = {getattr(Tensor, name) for name in ("__getitem__", "clone", "cpu", "cuda", "detach", "double", "float", "to")}
_MEANS = {Tensor.mean, torch.mean}


class OfReaders(Tensor):
    """A number of each reader.

    Attributes:
        weights: of each in their mean, which is then that of all rows; sums are as ever.
    """

    weights: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        given: Any = args[0] if args else None
        weights = given.weights if isinstance(given, OfReaders) else None
        with torch._C.DisableTorchFunctionSubclass():
            if weights is not None and func in _MEANS and len(args) == 1 and not kwargs and given.is_floating_point():
                return (given * weights.to(given)).sum() / weights.to(given).sum()
            found = func(*args, **kwargs)
            if weights is None or func not in _COPIES:
                return found
            return weighed(found, func(weights, *args[1:], **kwargs))


def weighed(numbers: Tensor, weights: Tensor) -> Tensor:
    """One number of each reader, and how each counts in their mean."""
    made = numbers.as_subclass(OfReaders)
    made.weights = weights.as_subclass(Tensor)
    return made


def gathered(tensor: Tensor, of_readers: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows of all readers without those that are filled in, or a number of each.

    Args:
        tensor: of this reader.
        of_readers: gathers tensors of one shape.
    """
    if not tensor.dim():
        numbers = of_readers(tensor if share() else torch.zeros_like(tensor))
        return weighed(numbers, of_readers(tensor.new_tensor(share(), dtype=torch.float32)))
    own = tensor if share() else tensor[:0]
    lengths: list[int] = of_readers(torch.tensor(len(own), device=tensor.device)).tolist()
    longest = max(lengths)
    padded = torch.cat([own, own.new_zeros(longest - len(own), *own.shape[1:])])
    rows = of_readers(padded).split(longest) if longest else []
    return torch.cat([one[:length] for one, length in zip(rows, lengths, strict=False)] or [own])
