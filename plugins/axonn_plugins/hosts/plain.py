"""Plain PyTorch as a host: a training loop of one's own under the ``"axonn"`` block.

::

    run = compose(model, lambda groups: torch.optim.AdamW(groups, lr=1e-3), {"tensor_parallel": {"gx": 2, "plan": "auto"}})
    for batch in batches:
        run.backward(run.model(run.mesh.shard_batch(batch)))
        run.step()

Start it by torchrun, with an initialised process group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import samo
from axonn_plugins import config
from axonn_plugins.config import Axonn, ConfigError
from axonn_plugins.config import compose as pairs
from axonn_plugins.hosts.common.agreement import meet
from axonn_plugins.hosts.common.composition import Composition
from axonn_plugins.hosts.common.fingerprint import of_configuration, of_model, of_versions
from axonn_plugins.hosts.common.goldfish import LabelMask, Weight
from axonn_plugins.hosts.common.tensor_parallel import layer_plans, options, refuse_keys_of_deepspeed
from axonn_plugins.observe.timeline.steps import asked, step_asked, step_begins, step_ended
from axonn_tp import Grid, Mesh, layout_of, parallelize
from axonn_tp.checkpoint.dealt import DealtNames, still_here
from axonn_tp.grid.device import device_of_rank
from axonn_tp.layers.loss_watch import LossWatch, OfExperts

_AXES = ("x", "y", "z", "data")


class Run:
    """A model under the block: `axonn_plugins.hosts.host.Host`.

    Attributes:
        model: split over the ranks.
        mesh: how; `mesh.shard_batch` gives this rank's part of a batch.
        optimizer: a `samo.Optimizer`, for schedulers.
        steps: optimizer steps that were taken.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.model, self.mesh, self.steps = model, mesh, 0
        self.optimizer: samo.Optimizer
        self._composition: Composition
        self._losses = LossWatch(model)

    def serial_names(self) -> dict[nn.Parameter, str]:
        """Names of this rank's parameters in the serial model."""
        names = DealtNames(self.model)
        return {parameter: names.outward(name) for name, parameter in self.model.named_parameters()}

    def stages_with(self, name: str) -> int:
        """One: there is no pipeline."""
        return 1

    def counts(self, parameter: Tensor) -> bool:
        """True if this rank counts a parameter in a sum over all ranks."""
        layout = layout_of(parameter)
        return layout.counted_here(self.mesh.over(layout.grid).coordinates, _AXES)

    def backward(self, loss: Tensor) -> None:
        """Backward of the mean loss of this rank's part of the batch, scaled where the loss is.

        Raises:
            ConfigError: the loss is of shards.
        """
        try:
            self._losses.look(loss)
        except ValueError as error:
            raise ConfigError(
                f"axonn.{'ted' if isinstance(error, OfExperts) else 'tensor_parallel'}: {error}"
            ) from None
        self.optimizer.scale(loss).backward()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in the ``with`` block only accumulate; all but the last of those that make a step."""
        return self.optimizer.no_sync()

    @property
    def total_norm(self) -> Tensor | None:
        """The whole model's gradient norm in the last step, before clipping; None unless clipping or scaling asked for it."""
        return self.optimizer.total_norm

    def step(self) -> None:
        """Average gradients, clip and update; every rank calls it."""
        self.optimizer.step()
        self.steps += 1
        self._composition.stepped()
        step_ended(self.mesh.axis_names())


def compose(
    model: nn.Module,
    factory: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    block: Mapping[str, Any],
    *,
    stage: int = 0,
    max_norm: float | None = None,
    loss_scale: float | str | None = None,
) -> Run:
    """Have a model obey the block; every rank calls it.

    Args:
        model: the serial model, the same on every rank; with ``ted`` each rank's MoE layers have its own experts.
        factory: makes an element-wise torch optimizer from parameter groups.
        block: what stands under "axonn" in a DeepSpeed configuration.
        stage: of ZeRO, 0, 1 or 2.
        max_norm: largest norm of the gradient.
        loss_scale: of `samo.Optimizer`.

    Raises:
        ConfigError: the first mistake, in one sentence.
    """
    if "samo" in block:
        samo.absorb(model)
    problem, found, trained = None, config.parse({}), [p for p in model.parameters() if p.requires_grad]
    mask: LabelMask | None = None
    try:
        found = config.parse(block)
        pairs.check(found)
        _refuse(found)
        if asked():
            step_asked()
        mask = None if found.goldfish is None else LabelMask(found.goldfish, model)
    except ConfigError as error:
        problem = str(error)
    settings: dict[str, Any] = {"axonn": dict(block), "stage": stage, "max_norm": max_norm, "loss_scale": loss_scale}
    meet(problem, of_configuration(settings) | of_versions() | of_model(model))
    if found.pccl is not None:
        from axonn_plugins.pccl import world

        world.take(found.pccl.options(), device_of_rank().type)
    mesh = _split(model, found)
    run = Run(model, mesh)
    if asked():
        model.register_forward_pre_hook(lambda *given: step_begins())
    if mask is not None:
        _mask_labels(model, mask, mesh)
    run._composition = Composition(found, stage, run)
    names = run.serial_names()
    trained = still_here(trained)
    settings = run._composition.settings(set(trained), names)
    groups = [{"params": [(names[parameter], parameter) for parameter in trained]}]
    try:
        run.optimizer = samo.Optimizer(factory, groups, max_norm=max_norm, loss_scale=loss_scale, **settings)
    except ValueError as error:
        raise ConfigError(f"axonn: {error}") from None
    run._composition.attach(run.optimizer)
    return run


def _mask_labels(model: nn.Module, mask: LabelMask, mesh: Mesh) -> None:
    weights: list[Weight | None] = []

    def masked(model: nn.Module, inputs: tuple, keywords: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        inputs, keywords = mask.arguments(inputs, keywords, model.training)
        weight = mask.weight(inputs, keywords, model.training, mesh.group("batch"), mesh.device)
        weights.append(weight and weight.__enter__())
        return inputs, keywords

    def weighed(model: nn.Module, inputs: tuple, output: Any) -> Any:
        weight = weights.pop() if weights else None
        if weight is None:
            return output
        weight.__exit__(None, None, None)
        return output if output is None else weight.of(output)

    model.register_forward_pre_hook(masked, with_kwargs=True)
    model.register_forward_hook(weighed, always_call=True)


def _refuse(block: Axonn) -> None:
    if block.pipeline is not None:
        raise ConfigError(
            "axonn.pipeline needs a host that cuts models into stages, which plain PyTorch does not; use a deepspeed.pipe.PipelineModule"
        )
    if block.tensor_parallel is not None and len(block.tensor_parallel.given) < 3:
        raise ConfigError(
            'axonn.tensor_parallel has sizes that are "auto", for which the batch must be known; run axonn plan, and give gx, gy and gz'
        )
    if block.tensor_parallel is not None:
        refuse_keys_of_deepspeed(block.tensor_parallel, "axonn.tensor_parallel.")
    for key in ("communication_aware_checkpointing", "stash"):
        if block.ted is not None and key in block.ted.model_fields_set and getattr(block.ted, key) is not False:
            raise ConfigError(
                f"axonn.ted.{key} = {json.dumps(getattr(block.ted, key))} is obeyed by DeepSpeed's engines and Megatron alone; leave it out"
            )


def _split(model: nn.Module, block: Axonn) -> Mesh:
    tensor, ted, world = block.tensor_parallel, block.ted, dist.get_world_size()
    sizes = {} if tensor is None else tensor.given
    if tensor is None and ted is not None:
        sizes = {"gx": ted.tensor}
    try:
        mesh = Mesh(Grid.for_world(world, **sizes, sequence=1 if tensor is None else tensor.sequence))
        chosen = None if tensor is None else options(tensor)
        plan: Any = "auto" if tensor is None or tensor.plan == "auto" else layer_plans(tensor)
        if ted is not None:
            from axonn_plugins.hosts.deepspeed.ted.on_mesh import split_with_experts

            groups = split_with_experts(model, mesh, ted, plan, chosen)
            if groups is None and ted.expert != "auto":
                raise ValueError(
                    f"ted.expert = {ted.expert}, and no experts were found in {type(model).__name__}; leave expert out"
                )
        elif tensor is not None:
            parallelize(model, mesh, plan, chosen)
        else:
            _same_on_all(model)
    except ValueError as error:
        raise ConfigError(f"axonn: {error}") from None
    return mesh


@torch.no_grad()
def _same_on_all(model: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor, src=0)
