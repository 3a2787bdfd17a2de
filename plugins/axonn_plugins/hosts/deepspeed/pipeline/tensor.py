"""Tensor parallelism inside the stages of a pipeline: stages × data × (gx, gy, gz) (000, chapters 3 and 5)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.deepspeed import replicas
from axonn_plugins.hosts.deepspeed.agreement import check_optimizer, compare
from axonn_plugins.hosts.deepspeed.engine import options
from axonn_plugins.hosts.deepspeed.optim.by_layout import MixedPrecisionOptimizer
from axonn_plugins.hosts.deepspeed.optim.wrapped import loss_scaler
from axonn_plugins.hosts.deepspeed.pipeline.engine import MessageDrivenEngine
from axonn_plugins.hosts.deepspeed.pipeline.stage_split import KEY, regroup, stage_grid, stage_plan
from axonn_plugins.hosts.deepspeed.replica_watch import ReplicaWatch
from axonn_plugins.hosts.deepspeed.whole_parameters import ShardShapes, mark
from axonn_tp import Mesh, first_difference, layout_of, parallelize, sync_gradients
from axonn_tp.comm.collectives import all_reduce
from axonn_tp.layers.exports import as_shards

_NOTE = "axonn_grid.json"


class TensorPipelineEngine(MessageDrivenEngine):
    """What `deepspeed.initialize` returns for a PipelineModule under ``axonn.pipeline`` and ``axonn.tensor_parallel``.

    A rank is x + gx·(y + gy·(z + gz·(data + gdata·stage))). Ranks of one (x, y, z, data) are a pipeline; those of one stage
    and data run the same passes in the same order.

    Attributes:
        mesh: of this stage.
    """

    def __init__(
        self,
        args: Any,
        model: PipelineModule,
        optimizer: Any = None,
        *rest: Any,
        config_class: Any = None,
        **keywords: Any,
    ) -> None:
        # DeepSpeed sets the device later, but our first collectives need it.
        get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
        self._split = config_class.axonn.tensor_parallel
        grid = stage_grid(self._split, model.mpu())
        compare(model, config_class, optimizer, keywords, _problem_with(optimizer))
        plan = stage_plan(model, self._split, grid)
        self._verify = self._split.verify_plan and bool(plan)
        self.mesh = Mesh(grid, get_accelerator().device_name().split(":")[0], model.num_stages)
        regroup(model, self.mesh)
        replicas.align_random_state(self.mesh)
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            # A function that sorts parameters by their shapes must see them before they are split.
            given = keywords.pop("model_parameters", None)
            keywords["model_parameters"] = list(model.parameters() if given is None else given)
            optimizer = optimizer(keywords["model_parameters"])
        parallelize(model, self.mesh, plan, options(self._split))
        self._replicas = ReplicaWatch(
            self.mesh, model, self._split.check_every, self._split.broadcast_inputs, stage=True
        )
        keywords["mpu"] = model.mpu()
        super().__init__(args, model, optimizer, *rest, config_class=config_class, **keywords)

    # The batch

    def _computing_together(self) -> list[list[int]]:
        grid = self.mesh.grid
        ranks, size = range(self.num_stages * grid.world), grid.gx * grid.gy * grid.gz
        return [list(ranks[first : first + size]) for first in ranks[::size]]

    def _next_batch(self) -> Any:
        """A batch on which ranks of one x-y plane agree."""
        batch = super()._next_batch()
        if self.mesh.size("model") == 1:
            return batch
        return self._replicas.call(("batch",), (batch,), {})[0][0]

    def _take_model_step(self, *rest: Any, **keywords: Any) -> None:
        super()._take_model_step(*rest, **keywords)
        self._replicas.stepped(self.global_steps)

    def _outputs(self, inputs: Any) -> Any:
        if self._verify and self.module.training and self.mesh.size("model") > 1:
            self._verify = False
            self._verify_plan(inputs)
        return super()._outputs(inputs)

    def _verify_plan(self, inputs: Any) -> None:
        half = self.fp16_enabled() or self.bfloat16_enabled()

        def run() -> Any:
            # Layers may change their input in place.
            return self.module(tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, inputs))

        found = first_difference(self.module, run, self.mesh, 0.1 if half else 1e-3)
        if found is not None:
            raise ConfigError(
                f"{KEY}.plan: the output of layer {found[0]} differs from the serial model's by {found[1]:.1%}; code before it looks across "
                "features that are split, or parts or heads are wrong: correct the plan, or name its layers self_contained"
            )

    # Sums

    def _broadcast_model(self) -> None:
        """Nothing to do: `parallelize` split the weights of each stage's first rank."""

    def buffered_allreduce_fallback(self, *rest: Any, **keywords: Any) -> None:
        """The sum that each weight's layout asks for, in place of DeepSpeed's."""
        sync_gradients(self.module.parameters(), self.mesh, average=self.gradient_average)

    def _counts(self, parameter: Tensor) -> bool:
        counted = layout_of(parameter).counted_here(self.mesh.coordinates)
        return counted and not getattr(parameter, "ds_pipe_replicated", False)

    def _gradient_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        return all_reduce(super()._gradient_norm(parameters).square(), self.mesh, "z").sqrt()

    def _configure_fp16_optimizer(self, optimizer: Any, low_precision_dtype: torch.dtype) -> MixedPrecisionOptimizer:
        scaler = loss_scaler(self, low_precision_dtype)
        return MixedPrecisionOptimizer(optimizer, self.mesh, scaler, self.gradient_clipping(), self._gradient_norm)

    def _configure_bf16_optimizer(self, optimizer: Any) -> MixedPrecisionOptimizer:
        return self._configure_fp16_optimizer(optimizer, torch.bfloat16)

    # Checkpoints

    def _configure_distributed_model(self, model: Any) -> None:
        super()._configure_distributed_model(model)
        # One file for each stage and (x, y, z); the replicas along data need none.
        tensor = self.mesh.grid.gx * self.mesh.grid.gy * self.mesh.grid.gz
        self.checkpoint_mp_rank = model.stage_id * tensor + model.axonn_place
        self.mp_world_size = model.num_stages * tensor

    def _configure_checkpointing(self, *rest: Any) -> None:
        DeepSpeedEngine._configure_checkpointing(self, *rest)
        self.save_non_zero_checkpoint = self.module.axonn_writes
        mark(self.module.parameters(), self.mesh)

    def _get_zero_param_shapes(self) -> Any:
        return ShardShapes()

    def _write(self, save_dir: str, tag: str, client_state: dict, **keywords: Any) -> None:
        """DeepSpeed's files, one for each (x, y, z) in the place of each, and a note of the grid."""
        with as_shards():
            super()._write(save_dir, tag, client_state, **keywords)
        if dist.get_rank() == 0:
            (Path(save_dir) / tag / _NOTE).write_text(json.dumps(self._shape()))

    def _read(self, load_dir: str, tag: str | None, *rest: Any, **keywords: Any) -> Any:
        """On the same stages and grid.

        Raises:
            ConfigError: it was written on others.
        """
        if tag is not None:
            note = Path(load_dir) / tag / _NOTE
            saved = json.loads(note.read_text()) if note.is_file() else "no axonn.tensor_parallel"
            if saved != self._shape():
                raise ConfigError(
                    f"{note.parent} was written on {saved} and can be read there only, and this run has {self._shape()}; use the same"
                )
        with as_shards():
            return super()._read(load_dir, tag, *rest, **keywords)

    def _shape(self) -> str:
        grid = self.mesh.grid
        return f"{self.num_stages} stages with gx={grid.gx} gy={grid.gy} gz={grid.gz}"


def _problem_with(optimizer: Any) -> str | None:
    try:
        check_optimizer(optimizer)
    except ValueError as error:
        return str(error)
    return None
