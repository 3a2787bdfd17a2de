"""DeepSpeed's PipelineEngine under ``axonn.pipeline``, with every other system inside its stages (000, chapters 3 to 5).

Partitioning, the data loader and `train_batch` are DeepSpeed's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from axonn_plugins.config import Axonn, ConfigError
from axonn_plugins.hosts.common import replicas
from axonn_plugins.hosts.common.elementwise import check_by_parameter
from axonn_plugins.hosts.common.split_states import split_states
from axonn_plugins.hosts.common.tensor_parallel import options
from axonn_plugins.hosts.deepspeed.agreement import compare, refuse_experts
from axonn_plugins.hosts.deepspeed.checkpoint.staged import StagedCheckpoints
from axonn_plugins.hosts.deepspeed.data_efficiency import refuse_dropped_tokens
from axonn_plugins.hosts.deepspeed.engine import choose_sizes, engines
from axonn_plugins.hosts.deepspeed.pipeline.batch import StageBatches
from axonn_plugins.hosts.deepspeed.pipeline.stage_split import (
    AXES,
    StageLayers,
    key_of,
    regroup,
    settings_of,
    stage_grid,
    stage_plan,
)
from axonn_plugins.hosts.deepspeed.pipeline.ties import mark_loss, refuse_untied, tie
from axonn_plugins.hosts.deepspeed.plan_check import check_plan, named
from axonn_plugins.hosts.deepspeed.replica_watch import ReplicaWatch
from axonn_plugins.hosts.deepspeed.scalars import as_vectors
from axonn_plugins.hosts.deepspeed.states import divisor
from axonn_plugins.hosts.deepspeed.states_config import take_over, take_over_whole
from axonn_plugins.hosts.deepspeed.ted.left_out import let_go
from axonn_plugins.hosts.deepspeed.ted.on_mesh import split_with_experts, without_experts
from axonn_plugins.hosts.deepspeed.ted.recompute import Stashes
from axonn_plugins.hosts.deepspeed.whole_parameters import mark
from axonn_tp import Grid, Mesh, parallelize, sync_gradients
from axonn_tp.layers.loss_watch import LossWatch


class MessageDrivenEngine(StagedCheckpoints, StageBatches):
    """The engine of `deepspeed.initialize` for a PipelineModule under ``axonn.pipeline``.

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
        block: Axonn = config_class.axonn
        if block.samo is not None:
            from samo.reparametrised import absorb

            absorb(model)
        if block.tensor_parallel is not None and len(block.tensor_parallel.given) < 3:
            planned, stage = StageLayers(model), model.stage_id
            keywords["config"] = choose_sizes(
                model, config_class, optimizer, keywords, planned, stage, model.num_stages, model.mpu()
            )
            block = config_class.axonn
        self._ted, self._split, self._key = block.ted, settings_of(block), key_of(block)
        self._stock_experts = self._split is None
        grid = _own_grid(model) if self._split is None else stage_grid(self._split, model.mpu(), self._key)
        if self._split is not None:
            refuse_dropped_tokens(config_class, grid, self._split.layout)
        if config_class.axonn_owner is None and config_class.axonn_stage and _of_doubles(model):
            take_over(config_class, "pipeline")
        if keywords.get("model_parameters") is not None:
            # Torch makes no optimizer of nothing, which a script may find to train in a stage; what is frozen is not stepped.
            frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
            keywords["model_parameters"] = list(keywords["model_parameters"])
            if not keywords["model_parameters"]:
                keywords["model_parameters"] = frozen
                for parameter in frozen:  # in checkpoints, which other stages read, it is not trained
                    parameter.axonn_stands_in = True  # type: ignore[attr-defined]
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            # A function that sorts parameters by their shapes must see them before they are split.
            given = keywords.pop("model_parameters", None)
            keywords["model_parameters"] = list(model.parameters() if given is None else given)
            optimizer = optimizer(keywords["model_parameters"])
        problem = self._problem_with(model, optimizer, config_class)
        if optimizer is None and config_class.optimizer_name is not None and not any(True for _ in model.parameters()):
            problem = (
                f"stage {model.stage_id} of the PipelineModule has no parameters, of which torch makes no optimizer; use fewer stages, or "
                "another partition_method"
            )
        compare(model, config_class, optimizer, keywords, problem)
        if take_over_whole(config_class, optimizer):
            self._own_states(config_class, optimizer)
        plan = {} if self._split is None else stage_plan(model, self._split, grid, self._ted, self._key)
        self._verify = self._split is not None and self._split.verify_plan and bool(plan)
        self.mesh = Mesh(grid, get_accelerator().device_name().split(":")[0], model.num_stages)
        if self._split is not None:
            regroup(model, self.mesh)
            replicas.align_random_state(self.mesh)
            if self._ted is None:
                parallelize(model, self.mesh, plan, options(self._split))
            else:
                split_with_experts(model, self.mesh, self._ted, plan, options(self._split))
                let_go(optimizer, keywords)
            if isinstance(optimizer, torch.optim.Optimizer):
                split_states(optimizer, self.mesh)
            every, broadcast = self._split.check_every, self._split.broadcast_inputs
            self._replicas = ReplicaWatch(self.mesh, model, every, broadcast, stage=True)
        keep = self._ted is not None and self._ted.communication_aware_checkpointing
        self._stashes = Stashes(self._ted.stash) if self._ted is not None and keep else None
        if self._stashes is not None:
            self._stashes.leave_weights(self.mesh)
        keywords["mpu"] = model.mpu()
        super().__init__(args, model, optimizer, *rest, config_class=config_class, **keywords)
        engines.add(self)
        self._losses = LossWatch(self.module)
        mark(self.module.parameters(), self.mesh, self.optimizer if self._owns else None)

    def _problem_with(self, model: PipelineModule, optimizer: Any, config_class: Any) -> str | None:
        block: Axonn = config_class.axonn
        if block.goldfish is not None and model.loss_fn is None:
            return (
                "axonn.goldfish masks the labels that a PipelineModule gives its loss_fn, and this one has none; pass loss_fn to the "
                "PipelineModule"
            )
        try:
            self._own_states(config_class, optimizer)
            refuse_untied(model)
            if self._ted is None and (self._split is not None or self._owns):
                refuse_experts(model)
            if self._split is not None or self._owns:
                check_by_parameter(optimizer, block.samo is not None)
        except ValueError as error:
            return str(error)
        return None

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        tie(self.module)
        mark_loss(self.module)
        super()._configure_optimizer(client_optimizer, model_parameters)

    # The batch

    def _computing_together(self) -> list[list[int]]:
        if self._split is None:
            return super()._computing_together()
        grid = self.mesh.grid
        ranks, size = range(self.num_stages * grid.world), grid.gx * grid.gy * grid.gz
        if (
            self._ted is not None or self._replicas_meet()
        ):  # tokens go to experts of other ranks, or norms take all samples
            size = grid.world
        return [list(ranks[first : first + size]) for first in ranks[::size]]

    def _agreed_batch(self) -> Any:
        """A batch on which ranks of one x-y plane agree."""
        batch = self._unread_batch()
        if self._split is None or self.mesh.size("replicas") == 1:
            return batch
        return self._replicas.call(("batch",), (batch,), {})[0][0]

    def _look_at(self, loss: Tensor) -> None:
        """Refuse what a loss_fn makes of shards."""
        if self._split is None:
            return
        try:
            self._losses.look(loss)
        except ValueError as error:
            raise ConfigError(f"{self._key}: {error}") from None
        if self._losses.summed is not None:
            raise ConfigError(
                f"{self._key}: loss_fn adds up {self._losses.summed}, of which a rank has a shard over x and y, so that train_batch would return a loss "
                "with this rank's part of that sum alone; have the optimizer decay weights"
            )

    def _take_model_step(self, *rest: Any, **keywords: Any) -> None:
        super()._take_model_step(*rest, **keywords)
        if self._split is not None:
            self._replicas.stepped(self.global_steps)

    def _outputs(self, inputs: Any) -> Any:
        if self._stashes is None or not torch.is_grad_enabled():
            return self._verified(inputs)
        with self._stashes.recording():
            return self._verified(inputs)

    def _verified(self, inputs: Any) -> Any:
        if self._verify and self.module.training and self.mesh.size("model") > 1:
            self._verify = False
            self._verify_plan(inputs)
        return super()._outputs(inputs)

    def _verify_plan(self, inputs: Any) -> None:
        half = self.fp16_enabled() or self.bfloat16_enabled()

        def run() -> Any:
            # Layers may change their input in place.
            return self.module(tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, inputs))

        with named(self._key), without_experts(self.module):
            check_plan(self.module, run, self.mesh, half=half)

    # Sums

    def _broadcast_model(self) -> None:
        """Nothing to do where `parallelize` split the weights of each stage's first rank."""
        if self._split is None:
            with as_vectors(self.module):
                super()._broadcast_model()

    def _reduce_gradients(self) -> None:
        if self._owns:
            self.optimizer.reducer.finish()
        else:
            super()._reduce_gradients()

    def buffered_allreduce_fallback(self, *rest: Any, **keywords: Any) -> None:
        """Sum gradients by their layouts where the optimizer is torch's; others of DeepSpeed's, and its experts, it sums itself.

        So it does in a type that the configuration names.
        """
        own = isinstance(self.optimizer, torch.optim.Optimizer) and not self.has_moe_layers
        if not own or (self._split is None and self._config.axonn_raw.get("communication_data_type")):
            super().buffered_allreduce_fallback(*rest, **keywords)
        else:
            sync_gradients(self.module.parameters(), self.mesh, divisor=divisor(self.gradient_average, self.mesh.grid))

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm of all stages, where the optimizer does not."""
        if self._owns:
            return
        trained = [p for p in self.module.parameters() if p.grad is not None]
        self._global_grad_norm = self._gradient_norm(trained).item()
        factor = self.gradient_clipping() / (self._global_grad_norm + 1e-6)
        if factor < 1 and trained:
            torch._foreach_mul_([p.grad for p in trained], factor)

    def _counts(self, parameter: Tensor) -> bool:
        if is_moe_param(parameter) and self._stock_experts:  # DeepSpeed's own, of which each expert rank has others
            return dist.get_rank(self.expert_data_parallel_group[parameter.group_name]) == 0  # type: ignore[attr-defined]
        # A tied weight counts on its first stage, and what a script has split itself on every slice.
        here = super()._counts(parameter) or (
            self._split is None and is_model_parallel_parameter(parameter) and self.mesh.rank("batch") == 0
        )
        return here and not getattr(parameter, "ds_pipe_replicated", False)

    def _gradient_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        counted = [p.grad.double().square().sum() for p in parameters if p.grad is not None and self._counts(p)]
        total = torch.stack(counted).sum() if counted else torch.zeros((), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.sqrt()

    def _copies(self, name: str) -> int:
        tied = self.module.tied_comms.items()
        return next((len(tie["ranks"]) for key, tie in tied if name.startswith(f"tied_modules.{key}.")), 1)


def _of_doubles(model: PipelineModule) -> bool:
    """True if any stage has weights in float64; every rank calls it."""
    everyone = [False] * dist.get_world_size()
    dist.all_gather_object(everyone, any(p.dtype == torch.float64 for p in model.parameters()))
    return any(everyone)


def _own_grid(model: PipelineModule) -> Grid:
    """The ranks of a stage whose layers are the script's own: along x those that it has split a layer over.

    Raises:
        ConfigError: its topology has the ranks in another order.
    """
    unit = model.mpu()
    axes = unit.topology().get_axis_names()
    if axes not in AXES:
        raise ConfigError(
            f"the PipelineModule's topology has the axes {', '.join(axes)}, and axonn.pipeline needs pipe, data or pipe, data, model; give "
            "num_stages in its place"
        )
    return Grid(gx=unit.get_slice_parallel_world_size(), gdata=unit.get_data_parallel_world_size())
