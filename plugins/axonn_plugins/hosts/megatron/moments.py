"""The moments that Megatron's training gives systems: gradients before each optimizer step, the step, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from axonn_plugins.autoload import on_import
from axonn_plugins.config.base import Block, ConfigError
from axonn_plugins.config.systems import REGISTERED
from axonn_plugins.hosts.host import System
from axonn_plugins.hosts.megatron.arguments import fail
from axonn_plugins.hosts.megatron.components import OWNERS
from axonn_plugins.hosts.megatron.originals import Originals

if TYPE_CHECKING:
    from axonn_plugins.hosts.megatron.host import MegatronHost

_STATES, _STEPS = "axonn_systems", "axonn_steps"


class Moments:
    """Systems of one's own in one run, and what was wrapped for them.

    Args:
        blocks: by key.
    """

    def __init__(self, blocks: Mapping[str, Block]) -> None:
        self._blocks = blocks
        self.systems: dict[str, System] = {}
        self._host: MegatronHost | None = None
        self._loaded: dict[str, Any] = {}
        self._steps: int | None = None
        self.originals = Originals()
        on_import("megatron.training.training", self._wrap_training)
        on_import("megatron.training.checkpointing", self._wrap_checkpointing)

    def _wrap_training(self, module: ModuleType) -> None:
        self.originals.wrap(module, "setup_model_and_optimizer", lambda original: self._with_systems(original, module))

    def _wrap_checkpointing(self, module: ModuleType) -> None:
        self.originals.wrap(module, "generate_state_dict", self._with_states)
        self.originals.wrap(module, "_load_base_checkpoint", self._keeping_states)

    def _with_systems(self, original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
        @wraps(original)
        def setup_model_and_optimizer(*args: Any, **named: Any) -> Any:
            made = original(*args, **named)
            model, optimizer = made[:2]
            if optimizer is not None:
                try:
                    self.attach(model, optimizer, module.get_args())
                except ConfigError as error:
                    fail(error)
            return made

        return setup_model_and_optimizer

    def attach(self, model: list[Any], optimizer: Any, args: Any) -> None:
        """Make the systems of a model, once a checkpoint has been read; every rank calls it.

        Raises:
            ConfigError: they do not go with it.
        """
        from axonn_plugins.hosts.megatron.host import MegatronHost

        self._host = host = MegatronHost(model, optimizer, args, self.steps(args))
        self.systems = {key: REGISTERED[key].system(block, host) for key, block in self._blocks.items()}
        self.resume(args)
        step = optimizer.step

        @wraps(step)
        @torch.no_grad()
        def with_moments(*given: Any, **named: Any) -> Any:
            for system in self.systems.values():
                system.gradients(host.gradients())
            result = step(*given, **named)
            host.steps += 1
            for system in self.systems.values():
                system.stepped()
            return result

        optimizer.step = with_moments

    def steps(self, args: Any) -> int | None:
        """The steps of the optimizer before the checkpoint that was read; None where it does not tell, or training begins anew."""
        return None if args.finetune else self._steps

    def resume(self, args: Any) -> None:
        """Have systems go on where a checkpoint was taken."""
        for key, system in self.systems.items():
            if key in self._loaded and not args.finetune:
                system.load_state_dict(self._loaded[key])

    def _with_states(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def generate_state_dict(args: Any, *rest: Any, **named: Any) -> Any:
            made = original(args, *rest, **named)
            states = {key: system.state_dict() for key, system in self.systems.items()}
            # Fewer than iterations, of which --iterations-to-skip leaves some out.
            steps = None if self._host is None else self._host.steps
            if getattr(args, "ckpt_convert_format", None) is not None:  # before there are systems, and instead of them
                states, steps = self._loaded, self._steps
            made = {**made, _STATES: states} if states else made
            return made if steps is None else {**made, _STEPS: steps}

        return generate_state_dict

    def loaded(self, state: Mapping[str, Any]) -> None:
        """Keep what is the same on all ranks of a checkpoint."""
        self._loaded = state.get(_STATES, self._loaded)
        self._steps = state.get(_STEPS, self._steps)

    def _keeping_states(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Checkpoints are read before there are systems."""

        @wraps(original)
        def load(*args: Any, **named: Any) -> Any:
            result = original(*args, **named)
            self.loaded(result[0] or {})
            return result

        return load


_installed: Moments | None = None


def install(blocks: Mapping[str, Block]) -> None:
    """Give systems their moments in models that `megatron.training` makes from now on; the last blocks count.

    Args:
        blocks: of systems, by key; those of `components.OWNERS` have an optimizer of ours made.
    """
    global _installed
    uninstall()
    if OWNERS.isdisjoint(blocks):
        _installed = Moments(blocks)
    else:
        from axonn_plugins.hosts.megatron.own_states import OwnStates

        _installed = OwnStates(blocks)


def uninstall() -> None:
    """Leave Megatron as it was before `install`; optimizers that were made keep their systems."""
    global _installed
    if _installed is not None:
        _installed.originals.restore()
    _installed = None
