"""SAMO on the stages of a pipeline: masks of the whole model, compressed gradients summed over ties, one norm for all stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor, nn

import samo
from axonn_plugins.config import ConfigError
from axonn_plugins.config.samo import Samo
from axonn_plugins.hosts.deepspeed.pipeline.engine import MessageDrivenEngine
from axonn_plugins.hosts.deepspeed.samo.engine import SamoEngine
from axonn_plugins.hosts.deepspeed.samo.pruning import Masks, Pruning


class SamoPipelineEngine(SamoEngine, MessageDrivenEngine):
    """What `deepspeed.initialize` returns for a PipelineModule under ``axonn.pipeline`` and ``axonn.samo``."""

    def __init__(self, args: Any, model: PipelineModule, *rest: Any, **keywords: Any) -> None:
        if model.mpu().get_slice_parallel_world_size() > 1:
            raise ConfigError(
                "axonn.samo prunes by weights that a stage holds whole, and the PipelineModule's topology has a model axis; make a topology of "
                "pipe and data"
            )
        super().__init__(args, model, *rest, **keywords)

    def _make_pruning(self, trained: set[nn.Parameter]) -> Pruning:
        return StagePruning(self._samo, self.module, trained, self.device)

    def _norm_of_all(self, squares: dict[str, Tensor]) -> Tensor:
        """The square of the norm of all stages' gradients, of which a tied weight's counts once."""
        parameters = dict(self.module.named_parameters())
        counted = [
            square.double().to(self.device)
            for name, square in squares.items()
            if not getattr(parameters.get(name), "ds_pipe_replicated", False)
        ]
        total = torch.stack(counted).sum() if counted else torch.zeros((), dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.mpu.get_model_parallel_group())
        return total

    def _exec_reduce_tied_grads(self) -> None:
        for weight, group in self.module.get_tied_weights_and_groups():
            if weight.requires_grad:
                dist.all_reduce(self.optimizer.samo.gradient_of(weight), group=group)

    def _masks_file(self) -> tuple[str, bool]:
        return f"axonn_samo-pipe_{self.stage_id:02d}.pt", self.grid.data_parallel_id == 0


class StagePruning(Pruning):
    """A pruner of which every rank has the parameters of its stage, and the threshold is one over all stages."""

    def __init__(self, block: Samo, module: Any, trained: set[nn.Parameter], device: torch.device) -> None:
        whole_world = dist.group.WORLD
        assert whole_world is not None
        replicas = module.mpu().get_data_parallel_world_size()
        stages = {f"tied_modules.{key}.": len(tie["ranks"]) for key, tie in module.tied_comms.items()}

        def find(name: str, parameter: Tensor) -> samo.Shard:
            tied = next((count for prefix, count in stages.items() if name.startswith(prefix)), 1)
            return samo.Shard(tuple(parameter.shape), replicas * tied)

        self._shards = samo.Shards(whole_world, find)
        super().__init__(block, module, trained, device)

    def _prepare(self, trained: set[nn.Parameter]) -> None:
        problem = None
        try:
            super()._prepare(trained)
        except ValueError as error:
            if self.block.mask is not None:
                raise
            problem = str(error)
            self._begin_search()
        # Patterns need not fit every stage.
        if all(other is not None for other in _everyone(problem)):
            raise ValueError(problem)

    def _make(self) -> Masks:
        if self.block.mask is not None:
            return self._read()
        assert self.block.sparsity is not None
        return samo.magnitude(self._targets.items(), self.block.sparsity, self.block.scope, shards=self._shards)

    def _search_for(self, settings: Any) -> samo.EarlyBird:
        assert self.block.sparsity is not None
        return samo.EarlyBird(
            self._targets.items(),
            self.block.sparsity,
            settings.window,
            settings.epsilon,
            self.block.scope,
            shards=self._shards,
        )

    def _from_file(self, file: str) -> tuple[Masks, Masks]:
        """All masks of the file, and this stage's."""
        masks = samo.read_masks(file)
        shapes = {name: tuple(p.shape) for name, p in self.module.named_parameters()}
        known = {name for names in _everyone(sorted(shapes)) for name in names}
        unknown = sorted(set(masks) - known)
        if unknown:
            raise ValueError(f'"{file}" has a mask of {unknown[0]!r}, which no stage has; correct the file')
        own = {name: mask for name, mask in masks.items() if name in shapes}
        for name, mask in own.items():
            if tuple(mask.shape) != shapes[name]:
                raise ValueError(
                    f'"{file}" has a mask of {tuple(mask.shape)} for {name!r} of {shapes[name]}; correct the file'
                )
        return masks, own

    def _from_first(self, work: Callable[..., Any], *inputs: Any) -> Any:
        problem, result = None, None
        try:
            result = work(*inputs)
        except ValueError as error:
            problem = str(error)
        for other in _everyone(problem):
            if other is not None:
                raise ConfigError(f"axonn.samo: {other}")
        return result

    def _shared(self, work: Callable[[], Masks | None]) -> Masks | None:
        return self._from_first(work)


def _everyone(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found
