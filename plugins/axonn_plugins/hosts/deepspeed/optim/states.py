"""Our optimizer as DeepSpeed's engine wants one, made from that which the configuration or the script names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor

import samo
from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.deepspeed.optim.wrapped import EngineOptimizer, Scale, factory_of, optimizer_state_of
from axonn_plugins.hosts.deepspeed.whole_parameters import forget


class StateOptimizer(EngineOptimizer, samo.Optimizer):
    """The engine's optimizer where the states are ours: compressed, shared out over ranks, or in host memory.

    Args:
        basic: the optimizer that the configuration or the script named, whose parameter groups and state are taken over.
        names: of the model's parameters.
        key: of the block, for messages.
        scaler: DeepSpeed's loss scaler; None where the loss is not scaled.
        clip_grad: largest norm of the gradient, 0 for no clipping; None: nor is the norm asked for.
        reduces: whether the backward pass under way reduces gradients, or accumulates them only.
        settings: of `samo.Optimizer`.

    Attributes:
        reduces_early: whether sums may begin while the backward pass runs, and not only behind it.

    Raises:
        ConfigError: the optimizer is not element-wise.
    """

    reduces_early = True
    takes_masks = False  # the engine's pruning says what is pruned

    def __init__(
        self,
        basic: torch.optim.Optimizer,
        names: Mapping[torch.nn.Parameter, str],
        key: str,
        scaler: Any,
        clip_grad: float | None,
        reduces: Callable[[], bool],
        **settings: Any,
    ) -> None:
        EngineOptimizer.__init__(self, scaler)
        self.key, self._reduces = key, reduces
        factory, number = factory_of(basic, key), count()
        groups = [
            {key: value for key, value in given.items() if key != "param_names"}
            | {"params": [(names.get(p) or f"outside.{next(number)}", p) for p in given["params"]]}
            for given in basic.param_groups
        ]
        scale = None if scaler is None else Scale(scaler)
        with self._in_words():
            # The norm is wanted where nothing is clipped, too: the engine tells it.
            most = None if clip_grad is None else clip_grad or float("inf")
            samo.Optimizer.__init__(self, factory, groups, max_norm=most, loss_scale=scale, **settings)
        self._go_on_from(basic)

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ConfigError(f"{self.key}: {error}") from None

    def _take(self, entry: Any) -> None:
        self.reducer.active = self.reduces_early and self._reduces()
        super()._take(entry)

    def step(self, closure: Any = None) -> Any:
        """Reduce what is left, unscale, clip, and update kept elements; skip the step when a gradient is not finite."""
        loss = samo.Optimizer.step(self, closure)
        self._note_norm()
        return loss

    def prune(self, masks: Mapping[str, Tensor]) -> None:
        """Prune from now on; state of what is kept stays.

        Raises:
            ConfigError: masks of other parameters.
        """
        with self._in_words():
            super().prune(masks)

    def backward_epilogue(self, **keywords: Any) -> None:
        """A backward pass has ended: have its gradients be all ranks', also where ranks used other parameters in it."""
        if self._reduces():
            self.reducer.end_pass()

    def destroy(self) -> None:
        """Leave the model's parameters alone."""
        self.release()
        forget(self)

    def offload_states(self, *rest: Any, **keywords: Any) -> None:
        """Refused: states are where the configuration says.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"engine.offload_states is for DeepSpeed's ZeRO, and the states are those of {self.key}; keep them in host memory by "
            "axonn.offload_optimizer or zero_optimization.offload_optimizer.device = cpu"
        )

    reload_states = offload_states

    def refresh_fp32_params(self) -> None:
        """Set the float32 weights from the parameters."""
        self.refresh_masters()

    def load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        """Load a state dict of any ranks, or a torch optimizer's of the dense model.

        Raises:
            ConfigError: it is of other parameters, or none of these.
        """
        if not load_optimizer_states:
            self.refresh_masters()
            return
        with self._in_words():
            super().load_state_dict(optimizer_state_of(state_dict, self.key))
