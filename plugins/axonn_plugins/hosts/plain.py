"""Plain PyTorch as a host: a training loop of one's own under the ``"axonn"`` block.

::

    run = compose(model, lambda groups: torch.optim.AdamW(groups, lr=1e-3), {"tensor_parallel": {"gx": 2, "plan": "auto"}})
    for batch in batches:
        run.backward(run.model(run.mesh.shard_batch(batch)))
        run.step()
    run.save("checkpoints/step_100")  # and run.load, on any grid

Start it by torchrun, with an initialised process group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import samo
from axonn_plugins import config
from axonn_plugins.config import Axonn, ConfigError
from axonn_plugins.config import compose as pairs
from axonn_plugins.hosts.common.agreement import meet
from axonn_plugins.hosts.common.complete import files_in
from axonn_plugins.hosts.common.composition import Composition
from axonn_plugins.hosts.common.fingerprint import of_arguments, of_configuration, of_model, of_versions
from axonn_plugins.hosts.common.goldfish import LabelMask, Weight
from axonn_plugins.hosts.common.portable import PortableState
from axonn_plugins.hosts.common.tensor_parallel import layer_plans, options, refuse_keys_of_deepspeed
from axonn_plugins.observe.timeline.steps import asked, step_asked, step_begins, step_ended
from axonn_plugins.optim.parameters import named_groups
from axonn_tp import Grid, Mesh, layout_of, parallelize
from axonn_tp.checkpoint import CheckpointError, Saving
from axonn_tp.checkpoint.dealt import DealtNames, still_here
from axonn_tp.checkpoint.state import Notes
from axonn_tp.checkpoint.training import Reading, check_kept
from axonn_tp.grid.device import device_of_rank
from axonn_tp.layers.loss_watch import LossWatch, OfExperts

_AXES = ("x", "y", "z", "data")
_SAVED_BY = (
    "save and load the run that compose returned by run.save(folder) and run.load(folder), which keep them for any grid"
)


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

    def save(
        self,
        folder: str | os.PathLike,
        scheduler: Any = None,
        extra: Any = None,
        asynchronous: bool = False,
        keep_last: int | None = None,
    ) -> Saving | None:
        """Write weights, the optimizer's states, masks and counts as a checkpoint that any grid, stage and block can load.

        Every rank calls it, between steps, with a folder that all see. It is complete or absent, as that of `axonn_tp.checkpoint.save`.

        Args:
            folder: its name.
            scheduler: anything with `state_dict`, as torch's schedulers.
            extra: what else to keep, as the position in the data; rank 0's is written.
            asynchronous: see `axonn_tp.checkpoint.save`.
            keep_last: see `axonn_tp.checkpoint.save`.

        Returns:
            What to wait for, when asynchronous.

        Raises:
            ValueError: `keep_last` is not a number of at least 1.
            CheckpointError: the same on every rank.
        """
        check_kept(keep_last)
        state = _State(self, scheduler)
        return state.write(Path(folder), *state.collect(extra), asynchronous, keep_last)

    def load(self, folder: str | os.PathLike, scheduler: Any = None, states: bool = True) -> Any:
        """Go on where a checkpoint was written, on any grid and number of ranks, at any stage, pruned or dense; every rank calls it.

        The checkpoint may be of `save`, of `axonn_tp.checkpoint.save`, which counts no steps, or of an engine of DeepSpeed with the block
        (``checkpoints/global_step100``, or ``checkpoints`` for its latest) and the same class of optimizer. Nothing is changed where anything
        does not fit.

        Args:
            folder: its name.
            scheduler: of the saved class.
            states: with the optimizer's states, the loss scale, what systems keep, the count of steps, and the random number generators;
                else weights and masks alone.

        Returns:
            `extra` as it was given to `save`, or an engine's client state.

        Raises:
            CheckpointError: one sentence that names what is damaged, missing, or does not fit; the same on every rank.
            ConfigError: the model that was read cannot be pruned as the block says; the same on every rank.
        """
        state = _State(self, scheduler)
        reading = Reading(state.ranks.together(lambda: files_in(Path(folder).absolute())), state.ranks)
        if scheduler is not None and "scheduler" not in reading.notes:
            raise CheckpointError("the checkpoint was saved without a scheduler; load it without one")
        extra = state.load(reading, states, schedule=True, counters=states)
        self._composition.loaded()
        if states:
            reading.restore_random_state()
        return extra


class _State(PortableState):
    """The state of a `Run` in its checkpoints.

    Args:
        run: the run.
        scheduler: of the learning rate; None: there is none.
    """

    def __init__(self, run: Run, scheduler: Any) -> None:
        names = DealtNames(run.model)
        self._run = run
        super().__init__(run.model, run.mesh, run.optimizer, run._composition, scheduler, names if names else None)

    def counters(self) -> dict[str, int]:
        """Steps, by DeepSpeed's name."""
        return {"global_steps": self._run.steps}

    def take_counters(self, saved: dict[str, int]) -> None:
        """Go on with the steps."""
        self._run.steps = saved.get("global_steps", self._run.steps)

    def scale(self) -> Notes:
        """The loss scale, and how it changes."""
        scale = self._run.optimizer.loss_scale
        return {} if scale is None else {"loss_scale": scale.state_dict()}

    def take_scale(self, notes: Notes) -> None:
        """Go on with a scale that moves, if this run's does; of an engine of DeepSpeed with the scale alone."""
        scale, saved, engine = self._run.optimizer.loss_scale, notes.get("loss_scale") or {}, notes.get("loss_scaler")
        if scale is None or not scale.dynamic:
            return
        if saved.get("dynamic"):
            scale.load_state_dict(saved)
        elif engine and "scale_window" in engine:
            scale.scale = float(engine["cur_scale"])


def compose(
    model: nn.Module,
    factory: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    block: Mapping[str, Any],
    *,
    stage: int = 0,
    max_norm: float | None = None,
    loss_scale: float | str | None = None,
    parameters: Iterable[Any] | None = None,
) -> Run:
    """Have a model obey the block; every rank calls it.

    Args:
        model: the serial model, the same on every rank; with ``ted`` each rank's MoE layers have its own experts.
        factory: makes an element-wise torch optimizer from parameter groups.
        block: what stands under "axonn" in a DeepSpeed configuration.
        stage: of ZeRO, 0, 1 or 2.
        max_norm: largest norm of the gradient.
        loss_scale: of `samo.Optimizer`.
        parameters: what the optimizer has, of the serial model, as torch's optimizers take it: groups with options of their own, or
            parameters; None: all that is trained.

    Raises:
        ConfigError: the first mistake, in one sentence.
    """
    if "samo" in block:
        samo.absorb(model)
    problem, found, trained = None, config.parse({}), [p for p in model.parameters() if p.requires_grad]
    groups, _ = named_groups(trained if parameters is None else parameters)
    mask: LabelMask | None = None
    try:
        found = config.parse(block)
        pairs.check(found)
        _refuse(found)
        found.require_gather(stage)
        if odd := {p for group in groups for p in group["params"]} - set(model.parameters()):
            raise ConfigError(f"compose was given {len(odd)} parameters that are not the model's; give the model's own")
        if asked():
            step_asked()
        mask = None if found.goldfish is None else LabelMask(found.goldfish, model)
    except ConfigError as error:
        problem = str(error)
    settings: dict[str, Any] = {"axonn": dict(block), "stage": stage, "max_norm": max_norm, "loss_scale": loss_scale}
    chosen = of_arguments(model, None, None if parameters is None else groups, None)
    meet(problem, of_configuration(settings) | of_versions() | of_model(model) | chosen)
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
    groups = [{**g, "params": [(names[p], p) for p in g["params"]]} for g in still_here(groups)]
    settings = run._composition.settings({p for g in groups for _, p in g["params"] if p.requires_grad}, names)
    try:
        run.optimizer = samo.Optimizer(factory, groups, max_norm=max_norm, loss_scale=loss_scale, **settings)
    except ValueError as error:
        raise ConfigError(f"axonn: {error}") from None
    run._composition.attach(run.optimizer)
    run.optimizer.axonn_saved_by = _SAVED_BY  # type: ignore[attr-defined]
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
