"""RigL (Evci et al., arXiv 1911.11134): the smallest weights give their places to pruned ones with the largest gradients."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from samo.selection import Magnitudes, Shards
from samo.stacks import Matrices


@dataclass(frozen=True)
class Regrowth:
    """When places change hands, and how many.

    Attributes:
        interval: optimizer steps from one change to the next.
        end_step: steps after which there is no more.
        fraction: which share of the kept elements of a parameter changes at first, α in the paper.
        start_step: steps before the network is pruned.
    """

    interval: int
    end_step: int
    fraction: float = 0.3
    start_step: int = 0

    def due(self, step: int) -> bool:
        """True if the gradients of the step after so many are for a change of the mask."""
        return self.start_step < step < self.end_step and (step - self.start_step) % self.interval == 0

    def share(self, step: int) -> float:
        """Which share changes after so many steps: α/2 · (1 + cos(π t/T)), section 3 of the paper."""
        past = (step - self.start_step) / (self.end_step - self.start_step)
        return self.fraction / 2 * (1 + math.cos(math.pi * past))


@torch.no_grad()
def regrow(
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    share: float,
    *,
    shards: Shards | None = None,
    stacks: Collection[Tensor] = (),
) -> dict[str, Tensor]:
    """Masks of the same sparsity, each parameter by itself (algorithm 1 of the paper).

    Of n kept elements round(share · n) with the smallest magnitudes are dropped, and as many grow where the dense gradient is largest
    among all that are not kept then; one that was just dropped may grow again and keeps its weight and state.

    Args:
        parameters: by name.
        gradients: dense, of all ranks, by the same names.
        masks: what is kept now.
        share: 0 to 1.
        shards: see `samo.magnitude`.
        stacks: see there.

    Raises:
        ValueError: a NaN among weights or gradients.
    """
    matrices = Matrices(parameters, shards, stacks)
    low = matrices.split({name: p.abs().masked_fill_(~masks[name], -1) for name, p in parameters.items()})
    found = Magnitudes(matrices.parameters, matrices.shards, low)
    kept = found.kept(matrices.split(masks))
    gone = {name: found.sizes[name] - kept[name] for name in found.names}
    stay = found.keep([([name], gone[name] + round(share * kept[name])) for name in found.names])
    # What stays is larger than all gradients, infinite ones among them.
    most = {name: one.abs().clamp_(max=torch.finfo(one.dtype).max) for name, one in matrices.split(gradients).items()}
    high = {name: one.masked_fill_(stay[name], torch.inf) for name, one in most.items()}
    grown = Magnitudes(matrices.parameters, matrices.shards, high).keep([([name], gone[name]) for name in found.names])
    return matrices.joined(grown)
