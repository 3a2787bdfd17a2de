"""The batch's loss on every stage, in the type of what is averaged, float64 included."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from axonn_plugins.config import ConfigError

_LIST = 2.0
"""Beside what says whether numbers were float64: they are several, as many as the second number says; less: they are none."""


class PipelineLosses(PipelineEngine):
    """The part of the engine that averages losses."""

    _expected: tuple[Tensor, Any] | None = None

    def _expect_loss(self) -> None:
        """This stage has made its last forward pass: be ready for the batch's loss, which comes while it computes.

        On an accelerator a collective that waits would hold a part of it.
        """
        if self.is_pipe_parallel and not self.is_last_stage() and self.device.type == "cpu":
            numbers = self._loss_numbers()
            group = self.grid.get_pipe_parallel_group()
            work = dist.broadcast(numbers, src=self._loss_stage_global_rank(), group=group, async_op=True)
            self._expected = numbers, work

    def _loss_numbers(self) -> Tensor:
        names = self.module.get_additional_losses() or ()
        return torch.empty(3 + len(names), dtype=torch.float64, device=self.device)

    def _aggregate_total_loss(self) -> Tensor:
        """The batch's loss, averaged over microbatches and data-parallel ranks, on every stage."""
        names = list(self.module.get_additional_losses() or ()) if not self.is_last_stage() else []
        if self.is_last_stage():
            names = list(self.total_additional_losses or ())
            more = [self.total_additional_losses[name] for name in names]
            own = [self._scale_loss_by_gas(total) for total in (self.total_loss, *more)]
            sums = torch.stack([loss.detach().double().reshape(()) for loss in own])
            averages = sums.clone()
            if self.is_data_parallel:
                dist.all_reduce(averages, group=self.grid.get_data_parallel_group())
                averages /= self.dp_world_size
            wide = torch.tensor([float(own[0].dtype == torch.float64)], dtype=torch.float64, device=self.device)
            numbers = torch.cat([wide, sums[:1], averages])
        else:
            numbers = self._loss_numbers()
        expected, self._expected = self._expected, None
        if expected is None:
            wide, self.dp_group_loss, loss, *others = self._from_last_stage(numbers)
        else:
            expected[1].wait()
            wide, self.dp_group_loss, loss, *others = _typed(expected[0])
        self.agg_additional_losses = OrderedDict(zip(names, others, strict=True)) if names else None
        return loss

    def _bcast_pipe_scalar(self, data: Any, src_rank: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A number of one rank, by default of the last stage, on every stage; where it is not from, of shape (1,) as DeepSpeed's.

        Of a list, as of the losses of microbatches that are not reduced, it is all of them.

        Raises:
            ConfigError: they are no numbers; the same on every stage.
        """
        source = self._loss_stage_global_rank() if src_rank is None else src_rank
        here, kind = self.global_rank == source, 0.0
        values: list[Any] = [] if not here else [data] if isinstance(data, Tensor) else list(data)
        numbers = torch.zeros(2, dtype=torch.float64, device=self.device)
        if here and all(isinstance(value, Tensor) and value.numel() == 1 for value in values):
            made = torch.stack([value.detach().reshape(()) for value in values])
            kind = float(made.dtype == torch.float64)
            numbers[0], numbers[1] = (kind, made[0]) if values[0] is data else (kind + _LIST, len(values))
        elif here:
            numbers[0] = -_LIST
        found = self._from_last_stage(numbers, source, dtype)[1]
        kind = numbers[0].item()
        if kind < 0:
            raise ConfigError(
                "eval_batch has outputs of microbatches that are no single numbers, which cannot be given to the other stages; pass bcast_loss=False, "
                "with which the last stage has them"
            )
        if kind < _LIST:
            return found if here else found.reshape(1)
        several = made.double() if here else torch.empty(int(numbers[1]), dtype=torch.float64, device=self.device)
        if self.is_pipe_parallel:
            dist.broadcast(several, src=source, group=self.grid.get_pipe_parallel_group())
        return several.to(dtype or (torch.float64 if kind > _LIST else torch.float32))

    def _from_last_stage(
        self, numbers: Tensor, source: int | None = None, dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        source = self._loss_stage_global_rank() if source is None else source
        if self.is_pipe_parallel:
            dist.broadcast(numbers, src=source, group=self.grid.get_pipe_parallel_group())
        return _typed(numbers, dtype)


def _typed(numbers: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Numbers of which the first says whether they were float64."""
    kind = dtype or (torch.float64 if numbers[0] else torch.float32)
    return [number.to(kind) for number in numbers]
