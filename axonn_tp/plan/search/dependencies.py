"""Which tensors an activation was made of, read from its autograd graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Reach:
    """Which leaves an autograd graph reaches, as a set of bits, each node visited once."""

    def __init__(self, leaves: Mapping[int, int]) -> None:
        self._leaves = leaves
        # A node's Python object lives as long as somebody holds it: here, as a key.
        self._known: dict[Any, int] = {None: 0}

    def __call__(self, tensor: Tensor) -> int:
        """The bits of all leaves that `tensor` was made of."""
        if tensor.grad_fn is None:
            return self._leaves.get(id(tensor), 0)
        stack: list[Any] = [tensor.grad_fn]
        while stack:
            node = stack[-1]
            below = [child for child, _ in node.next_functions]
            missing = [child for child in below if child not in self._known]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            own = self._leaves.get(id(getattr(node, "variable", None)), 0)
            for child in below:
                own |= self._known[child]
            self._known[node] = own
        return self._known[tensor.grad_fn]
