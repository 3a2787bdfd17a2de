"""Newton–Schulz on a matrix that ranks have panels of: the 3D product with the short side whole, exact up to rounding.

X ← aX + (bA + cA²)X with A = XXᵀ (Jordan et al., 2024); only A is summed over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

Coefficients = tuple[float, float, float]


@dataclass(frozen=True)
class Iteration:
    """Numbers of an iteration.

    Attributes:
        coefficients: a, b and c.
        steps: how many.
        eps: the least norm that X is divided by; or what is added to its norm.
        dtype: of X meanwhile.
        added: whether eps is added.
        scale: by which the result is multiplied.
        heads: equal parts of the rows, each of which is a matrix.
    """

    coefficients: Coefficients
    steps: int
    eps: float
    dtype: torch.dtype
    added: bool = False
    scale: float = 1.0
    heads: int = 1


def orthogonalise(
    panel: Tensor | None,
    shape: tuple[int, int],
    iteration: Iteration,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor | None:
    """This rank's panel of what the whole matrix becomes; every rank of the group calls it.

    Args:
        panel: consecutive elements of the longer side of X; None: this rank has none.
        shape: of X.
        iteration: the numbers.
        group: the ranks that have panels.
        device: of the panels.

    Returns:
        The panel, new.
    """
    tall = shape[0] > shape[1]
    nothing = torch.zeros(min(shape), 0, device=device)
    x = (nothing if panel is None else panel.t() if tall else panel).to(iteration.dtype)

    def gram() -> Tensor:
        found = x @ x.t()
        if group is not None:
            dist.all_reduce(found, group=group)
        return found

    a, b, c = iteration.coefficients
    product = gram()
    norm = product.trace().sqrt()
    norm = norm + iteration.eps if iteration.added else norm.clamp(min=iteration.eps)
    x, product = x / norm, product / norm.square()
    for step in range(iteration.steps):
        product = gram() if step else product
        x = a * x + (b * product + c * product @ product) @ x
    return None if panel is None else (x.t() if tall else x).to(panel.dtype) * iteration.scale
