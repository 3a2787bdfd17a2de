"""Gradients of the first batches under a host, by which weights are scored before any of them has moved."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

import samo
from samo.scores import sensitivity


class FirstGradients:
    """The sum of some batches' gradients; every rank calls each method.

    Args:
        parameters: this rank's parts of what is to be pruned, by name.
        batches: how many are wanted.

    Attributes:
        taken: how many have come.
    """

    def __init__(self, parameters: Mapping[str, Tensor], batches: int) -> None:
        self._parameters, self._batches, self.taken = parameters, batches, 0
        self._sums: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}

    @property
    def complete(self) -> bool:
        """True once all batches have come."""
        return self.taken >= self._batches

    @torch.no_grad()
    def take(self, optimizer: samo.Optimizer, scale: float) -> None:
        """Add the reduced gradients of a step that moves no weight.

        Args:
            optimizer: of the dense model.
            scale: by which they are multiplied.
        """
        for entry, begin, values in optimizer.reduced():
            if entry.name in self._parameters:
                wide = torch.promote_types(values.dtype, torch.float32)
                room = torch.zeros(entry.parameter.numel(), dtype=wide, device=values.device)
                self._sums.setdefault(entry.name, room)[begin : begin + values.numel()] += values / scale
        self.taken += 1
        if self.complete:
            self.so_far(optimizer)

    def so_far(self, optimizer: samo.Optimizer) -> dict[str, Tensor]:
        """The sums of what has come, of this rank's parts; those without any gradient are left out.

        Args:
            optimizer: as given to `take`.
        """
        if optimizer.stage:
            self._collect(optimizer)
        self._before |= {name: self._before.get(name, 0) + one for name, one in self._sums.items()}
        self._sums = {}
        return {name: one.view_as(self._parameters[name]) for name, one in self._before.items()}

    def go_on(self, taken: int, sums: Mapping[str, Tensor]) -> None:
        """Go on where `so_far` was taken, on any mesh.

        Args:
            taken: how many batches had come.
            sums: of them.
        """
        self.taken = taken
        self._before = {name: one.reshape(-1) for name, one in sums.items() if name in self._parameters}

    def _collect(self, optimizer: samo.Optimizer) -> None:
        """Put together what ranks have a share of each."""
        for store in optimizer.stores:
            for bucket in store.buckets:
                for entry in bucket.entries if bucket.sharded else ():
                    if entry.name in self._parameters:
                        wide = torch.promote_types(bucket.dtype, torch.float32)
                        room = torch.zeros(entry.parameter.numel(), dtype=wide, device=entry.parameter.device)
                        dist.all_reduce(self._sums.setdefault(entry.name, room), group=bucket.process_group)

    def scores(self) -> dict[str, Tensor]:
        """|w · g| of each weight, zeros where no gradient has come."""
        return {name: sensitivity(p, self._of(name, p)) for name, p in self._parameters.items()}

    def _of(self, name: str, parameter: Tensor) -> Tensor | None:
        return self._before[name].view(parameter.shape) if name in self._before else None
