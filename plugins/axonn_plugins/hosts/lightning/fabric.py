"""Fabric's strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.wrappers import _FabricOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common.elementwise import check_optimizer
from axonn_plugins.hosts.common.split_states import note_late_groups, parameters_of, sorted_by_shards
from axonn_plugins.hosts.lightning import files
from axonn_plugins.hosts.lightning.bare_backward import allow_penalties
from axonn_plugins.hosts.lightning.gradients import Gradients, finish, gradients_of
from axonn_plugins.hosts.lightning.states import own_state, whole_state
from axonn_plugins.hosts.lightning.strategy import AxonnStrategy
from axonn_tp import full_state_dict


class FabricStrategy(AxonnStrategy, ParallelStrategy):
    """`AxonnStrategy` as Fabric has it."""

    _launcher_class = _SubprocessScriptLauncher

    def _join(self) -> None:
        super()._join()
        allow_penalties(FabricStrategy)
        note_late_groups()
        _take_whole_states()
        self._backward_sync_control = _SyncControl()
        self._gradients: dict[nn.Module, Gradients] = {}

    def _chosen_precision(self) -> Any:
        return self.precision

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager:
        """Models are made in host memory, or without memory where `empty_init`, by their `reset_parameters` when they are split."""
        stack = ExitStack()
        stack.enter_context(self._init_context(empty_init))
        stack.enter_context(self.precision.module_init_context())
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing: a model reaches its device layer by layer, when it is split."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Split a model."""
        return self.setup_module_and_optimizers(module, [])[0]

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Split a model, whose optimizers keep its parameters."""
        self.split(module, optimizers)
        if module not in self._gradients:
            module.register_forward_pre_hook(self._called, with_kwargs=True, prepend=True)
        self._gradients[module] = gradients_of(module, self.mesh)
        self._gradients[module].optimizers = [*optimizers]
        self._backward_sync_control.gradients = self._gradients
        return module, optimizers, scheduler

    def _called(self, module: nn.Module, inputs: tuple, keywords: dict[str, Any]) -> None:
        self.replicas.inputs((inputs, keywords), "what the model is called with")

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """An optimizer of a model that is split already.

        Raises:
            ConfigError: it is not element-wise, or its groups may be by the shapes of shards.
        """
        if self.grid.world > self.grid.gdata:
            check_optimizer(optimizer)
        if sorted_by_shards(optimizer, self._gradients):
            raise ConfigError(
                f"{type(optimizer).__name__} was made of parameters that are split already and has groups of both matrices and vectors, which a script that "
                "sorts by dimensions cannot tell apart, for a matrix's shard along z is flat; make it before the split, and give it to "
                "fabric.setup(model, optimizer), or to fabric.setup_optimizers after fabric.setup_module"
            )
        stepped = set(parameters_of(optimizer))
        for module, gradients in self._gradients.items():
            if not stepped.isdisjoint(module.parameters()):
                others = [one for one in gradients.optimizers if stepped.isdisjoint(parameters_of(one))]
                gradients.optimizers = [*others, optimizer]
        return optimizer

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """See `reduce`."""
        return self.reduce(tensor, group, reduce_op)

    def backward(self, tensor: Tensor, module: nn.Module | None, *rest: Any, **named: Any) -> None:
        """Backward, and the sums over readers of the gradients of all models that the loss went through."""
        self.replicas.loss(tensor)
        for gradients in self._gradients.values():
            gradients.prepare(tensor)
        super().backward(tensor, module, *rest, **named)
        finish(self._gradients.values(), self.mesh)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the whole model's norm.

        Raises:
            RuntimeError: it is not finite, and that is an error.
        """
        self.precision.unscale_gradients(optimizer)
        norm = self.clip(self.precision.main_params(optimizer), max_norm, norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the gradients' norm of type {norm_type} is {norm.item()}; to clip all the same, pass error_if_nonfinite=False"
            )
        return norm

    # Checkpoints

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The serial model's, on rank 0."""
        return full_state_dict(module, self.mesh)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state as one process has it, on rank 0."""
        return whole_state(optimizer, self.mesh)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: dict[str, Callable] | None = None
    ) -> None:
        """Write a checkpoint, complete or absent; every rank calls it."""
        if self.settings.state_dict_type == "sharded":
            files.save_folder(self.broadcast(path), state, self.mesh, filter)
            return
        converted = self._convert_stateful_objects_in_state(state, filter=filter or {})
        files.save_file(self.checkpoint_io, converted, path, storage_options)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint of any grid or of one process; every rank calls it."""
        if files.is_folder(path):
            return files.load_folder(path, state, self.mesh, strict)
        if isinstance(state, Optimizer):
            state = _Split(state, self)
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, strict, weights_only)
        given = {key: _Split(value, self) if isinstance(value, Optimizer) else value for key, value in state.items()}
        rest = super().load_checkpoint(path, given, strict, weights_only)
        state.update({key: value for key, value in given.items() if not isinstance(value, _Split)})
        return rest


def _take_whole_states() -> None:
    """Have Fabric's optimizers take from a state dict of theirs, which is one process', this rank's part; harmless when called again."""
    original = _FabricOptimizer.load_state_dict
    if getattr(original, "axonn", False):
        return

    @wraps(original)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        if isinstance(self._strategy, FabricStrategy):
            state_dict = own_state(self.optimizer, state_dict, self._strategy.mesh)
        original(self, state_dict)

    load_state_dict.axonn = True  # type: ignore[attr-defined]
    _FabricOptimizer.load_state_dict = load_state_dict


class _Split(torch.optim.Optimizer):
    """Takes an optimizer's state of one process."""

    def __init__(self, optimizer: Optimizer, strategy: FabricStrategy) -> None:
        self._optimizer, self._strategy = optimizer, strategy

    def state_dict(self) -> dict[str, Any]:
        return self._strategy.get_optimizer_state(self._optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(own_state(self._optimizer, state_dict, self._strategy.mesh))


class _SyncControl(_BackwardSyncControl):
    gradients: dict[nn.Module, Gradients] = {}

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        """Backward passes inside only accumulate, if `enabled`."""
        return self._without(module) if enabled else nullcontext()

    @contextmanager
    def _without(self, module: nn.Module) -> Iterator[None]:
        with self.gradients[module].no_sync():
            yield
