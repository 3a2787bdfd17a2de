"""Early-bird tickets (You et al., arXiv 1909.11957): prune as soon as the mask that magnitudes would give has settled."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from samo.mask_file import pack, unpack
from samo.pruning import chosen, require_alive, require_scope, smallest
from samo.selection import Magnitudes, Shards, total
from samo.stacks import Matrices, stacks_of
from samo.targets import Parameters, require_values

_ONES = numpy.unpackbits(numpy.arange(256, dtype=numpy.uint8)[:, None], axis=1).sum(1, dtype=numpy.uint8)


class EarlyBird:
    """Watches the mask of a dense model in training until it has stopped changing.

    The distance of two masks is the share of prunable elements in which they differ (the Hamming distance, normalised). The
    search ends when the distances to the masks of the last `window` observations are all below `epsilon`: after window + 1
    observations at the earliest. At sparsity s no two masks are further apart than 2·min(s, 1 − s).

    ::

        search = samo.EarlyBird(model, sparsity=0.9)
        for epoch in range(epochs):
            train(model)
            if search.observe():
                optimizer.prune(search.masks)
                break

    Args:
        model: a module, or pairs of name and parameter.
        sparsity: which share to prune, 0 to 1 inclusive.
        window: how many earlier masks the newest is compared with.
        epsilon: the distance below which masks count as the same.
        scope: see `samo.magnitude`, as for those that follow.
        include: see there.
        exclude: see there.
        shards: see there; every rank of the group observes.
        stacks: see there.

    Attributes:
        masks: by parameter name, once found; None until then.
        distances: for each observation the distances to those before it, the oldest first.

    Raises:
        ValueError: an argument that is not allowed.
    """

    def __init__(
        self,
        model: Parameters,
        sparsity: float,
        window: int = 5,
        epsilon: float = 0.1,
        scope: str = "layer",
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        *,
        shards: Shards | None = None,
        stacks: Collection[Tensor] | None = None,
    ) -> None:
        require_scope(sparsity, scope)
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"window = {window!r} is not a number of observations; use 1 or more, such as 5")
        if not isinstance(epsilon, (int, float)) or not 0 < epsilon <= 1:
            raise ValueError(
                f"epsilon = {epsilon!r} is not a distance between masks; use a number above 0 and up to 1, such as 0.1"
            )
        self.sparsity, self.window, self.epsilon = sparsity, window, epsilon
        self._scope, self._shards = scope, shards
        self._stacks = stacks_of(model, shards) if stacks is None else stacks
        self._parameters = chosen(model, include, exclude, shards)
        self._recent: deque[dict[str, Tensor]] = deque(maxlen=window)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.masks: dict[str, Tensor] | None = None
        self.distances: list[list[float]] = []

    def observe(self) -> bool:
        """Look at the weights as they are now, once an epoch or each so many steps.

        Returns:
            Whether the ticket is found; once it is, nothing is looked at any more.

        Raises:
            ValueError: a weight is NaN; the ticket would keep nothing of a parameter.
        """
        if self.masks is not None:
            return True
        require_values(self._parameters)
        with torch.no_grad():
            matrices = Matrices(self._parameters, self._shards, self._stacks)
            found = Magnitudes(matrices.parameters, matrices.shards)
            masks = matrices.joined(smallest(found, self.sparsity, self._scope))
        self._shapes = {name: tuple(mask.shape) for name, mask in masks.items()}
        packed = {name: pack(mask) for name, mask in masks.items()}
        distances = self._distances(packed, sum(found.sizes.values()))
        self.distances.append(distances)
        if len(distances) == self.window and max(distances) < self.epsilon:
            require_alive(found, matrices.split(masks), self.sparsity, self._scope)
            self.masks = masks
            self._recent.clear()
        else:
            self._recent.append(packed)
        return self.masks is not None

    def _distances(self, packed: dict[str, Tensor], size: int) -> list[float]:
        """From these masks to the recent ones; `size` elements are prunable on all ranks together."""
        if not self._recent:
            return []
        elsewhere = None if self._shards is None else self._shards.device  # a stage may have nothing to prune
        device = next((self._parameters[name].device for name in packed), elsewhere)
        counts = torch.zeros(len(self._recent), dtype=torch.float64, device=device)
        for name, mask in packed.items():
            copies = 1 if self._shards is None else self._shards.find(name, self._parameters[name]).copies
            for number, before in enumerate(self._recent):
                counts[number] += int(_ONES[(mask ^ before[name]).numpy()].sum(dtype=numpy.int64)) / copies
        return [count / max(size, 1) for count in total(counts, self._shards).tolist()]

    def state_dict(self) -> dict[str, Any]:
        """The search's state on this rank, masks with eight elements a byte; for `torch.save`."""
        masks = None if self.masks is None else {name: pack(mask) for name, mask in self.masks.items()}
        shapes = {name: list(shape) for name, shape in self._shapes.items()}
        return {
            "sparsity": self.sparsity,
            "shapes": shapes,
            "recent": [dict(packed) for packed in self._recent],
            "masks": masks,
            "distances": [list(found) for found in self.distances],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ValueError: it is of another sparsity or other parameters.
        """
        if state["sparsity"] != self.sparsity:
            raise ValueError(
                f"the search that was saved is for sparsity = {state['sparsity']}, this one for {self.sparsity}; use the same, or "
                "begin anew"
            )
        shapes = {name: tuple(shape) for name, shape in state["shapes"].items()}
        ours = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        if shapes and shapes != ours:
            name = next(name for name in [*shapes, *ours] if shapes.get(name) != ours.get(name))
            raise ValueError(
                f"the search that was saved has {shapes.get(name, 'no mask')} for {name!r}, this one "
                f"{ours.get(name, 'no mask')}; load it for the same model, include and exclude"
            )
        self._shapes = shapes
        self._recent = deque(state["recent"], maxlen=self.window)
        self.distances = [list(found) for found in state["distances"]]
        self.masks = None
        if state["masks"] is not None:
            self.masks = {
                name: unpack(t, shapes[name]).to(self._parameters[name].device) for name, t in state["masks"].items()
            }
