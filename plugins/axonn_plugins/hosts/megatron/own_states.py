"""Systems in whose place Megatron has an optimizer: its gradient buffers and float32 weights are not made, and ours are.

`DistributedDataParallel` sees no parameter that is trained, so that it has no buffer and no hook; what Megatron sums over other than
data-parallel ranks it finds in ``main_grad`` when it asks.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from axonn_plugins.config import Axonn
from axonn_plugins.config.base import Block
from axonn_plugins.hosts.megatron import states_checkpoint
from axonn_plugins.hosts.megatron.moments import Moments
from axonn_plugins.hosts.megatron.states_optimizer import HALVES, StateOptimizer


class OwnStates(Moments):
    """An optimizer of ours in the place of Megatron's, with systems of one's own beside it.

    Args:
        blocks: by key, with ``samo`` or ``offload_optimizer``, or both.
    """

    def __init__(self, blocks: Mapping[str, Block]) -> None:
        ours: dict[str, Any] = {key: block for key, block in blocks.items() if key in Axonn.model_fields}
        self._block = Axonn(**ours)
        self._block.others.update({key: block for key, block in blocks.items() if key not in ours})
        self._optimizer: StateOptimizer | None = None
        super().__init__(self._block.others)
        self.originals.wrap(DistributedDataParallel, "__init__", self._without_buffers)
        self.originals.wrap(DistributedDataParallel, "finish_grad_sync", self._with_main_grads)

    def _wrap_training(self, module: ModuleType) -> None:
        super()._wrap_training(module)
        self.originals.wrap(module, "get_megatron_optimizer", lambda original: self._ours(original, module))

    def _without_buffers(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @wraps(original)
        def init(model: Any, *args: Any, **named: Any) -> None:
            module = signature.bind(model, *args, **named).arguments["module"]
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            for parameter in trained:
                parameter.requires_grad_(False)
            original(model, *args, **named)
            for parameter in trained:
                parameter.requires_grad_(True)
                if model.ddp_config.grad_reduce_in_fp32 and parameter.dtype in HALVES:
                    parameter.grad_dtype = torch.float32

        return init

    def _with_main_grads(self, original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def finish_grad_sync(model: Any, *args: Any, **named: Any) -> None:
            if self._optimizer is not None:
                self._optimizer.lend(model)
            original(model, *args, **named)

        return finish_grad_sync

    def _ours(self, original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
        @wraps(original)
        def get_megatron_optimizer(config: Any, *args: Any, **named: Any) -> StateOptimizer:
            # Of the model's own parameters, for their groups alone.
            plain = copy.copy(config)
            plain.bf16 = plain.fp16 = False
            made = original(plain, *args, **named)
            known = {key for one in made.chained_optimizers for key in one.optimizer.defaults}
            groups = [{key: one for key, one in group.items() if key not in known} for group in made.param_groups]
            self._optimizer = StateOptimizer(groups, config, module.get_args().check_for_nan_in_loss_and_grad)
            return self._optimizer

        return get_megatron_optimizer

    def attach(self, model: list[Any], optimizer: StateOptimizer, args: Any) -> None:
        """Make the states of a model, once a checkpoint has been read, and the systems; every rank calls it.

        Raises:
            ConfigError: they do not go with it.
        """
        optimizer.begin(model, args, self._block, self.steps(args))
        self._host = optimizer.host
        self.systems = optimizer.composition.systems
        self.resume(args)

    def loaded(self, state: Mapping[str, Any]) -> None:
        """Keep what is the same on all ranks of a checkpoint."""
        super().loaded(state)
        notes = (state.get("optimizer") or {}).get(states_checkpoint.NOTES)
        if notes and self._optimizer is not None and self._block.samo is not None:
            self._optimizer.notes = notes
