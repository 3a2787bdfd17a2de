"""What Lightning learns of us, and when: the name ``"axonn"``, which class `AxonnStrategy` becomes, LitGPT's switch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from axonn_plugins.autoload import on_import

_armed = False


def register_fabric(module: ModuleType) -> None:
    """Add to ``lightning.fabric.strategies``; harmless when called again."""
    module.STRATEGY_REGISTRY.register("axonn", _named, description=_DESCRIPTION, override=True)


def register_trainer(module: ModuleType) -> None:
    """Add to ``lightning.pytorch.strategies``; harmless when called again."""
    module.StrategyRegistry.register("axonn", _named, description=_DESCRIPTION, override=True)


_DESCRIPTION = "3D parallel matrix multiplication: by default weights and data over all devices; AXONN_STRATEGY gives sizes"


def _named() -> Any:
    """The strategy ``"axonn"``: as the environment says, or over z."""
    from axonn_plugins.hosts.lightning.settings import from_environment
    from axonn_plugins.hosts.lightning.strategy import AxonnStrategy

    given = from_environment()
    return AxonnStrategy(gz="all") if given is None else AxonnStrategy(**given)


def patch_fabric(module: ModuleType) -> None:
    """Add to ``lightning.fabric.connector``; harmless when called again."""

    def kind() -> type:
        from axonn_plugins.hosts.lightning.fabric import FabricStrategy

        return FabricStrategy

    _patch(module._Connector, kind)


def patch_trainer(module: ModuleType) -> None:
    """Add to ``lightning.pytorch.trainer.connectors.accelerator_connector``; harmless when called again."""

    def kind() -> type:
        from axonn_plugins.hosts.lightning.trainer import TrainerStrategy

        return TrainerStrategy

    _patch(module._AcceleratorConnector, kind)


def _patch(connector: Any, kind: Callable[[], type]) -> None:
    if getattr(connector, "axonn", False):
        return
    connector.axonn = True
    checked, initialised = connector._check_config_and_set_final_flags, connector._init_strategy

    @wraps(checked)
    def _check_config_and_set_final_flags(self: Any, strategy: Any, *rest: Any, **named: Any) -> None:
        _become(strategy, kind)
        checked(self, strategy, *rest, **named)

    @wraps(initialised)
    def _init_strategy(self: Any) -> None:
        initialised(self)
        _become(self.strategy, kind)

    connector._check_config_and_set_final_flags = _check_config_and_set_final_flags
    connector._init_strategy = _init_strategy


def _become(strategy: Any, kind: Callable[[], type]) -> None:
    ours = sys.modules.get("axonn_plugins.hosts.lightning.strategy")
    if ours is not None and isinstance(strategy, ours.AxonnStrategy):
        strategy.become(kind())


def keep_order(module: ModuleType) -> None:
    """Add to ``lightning.pytorch.trainer.connectors.data_connector``; harmless when called again.

    It shuffles what several processes train on, shuffled or not; readers go through data that is in order in order, as one process does.
    """
    original = module._get_distributed_sampler
    if getattr(original, "axonn", False):
        return

    @wraps(original)
    def _get_distributed_sampler(dataloader: Any, shuffle: bool, *rest: Any, **named: Any) -> Any:
        from torch.utils.data import SequentialSampler

        from axonn_plugins.hosts.lightning.replicas import Readers

        ours = isinstance(named.get("num_replicas"), Readers)
        ordered = ours and isinstance(dataloader.sampler, SequentialSampler)
        return original(dataloader, shuffle and not ordered, *rest, **named)

    _get_distributed_sampler.axonn = True  # type: ignore[attr-defined]
    module._get_distributed_sampler = _get_distributed_sampler  # type: ignore[attr-defined]


TARGETS: dict[str, Callable[[ModuleType], None]] = {
    "lightning.fabric.strategies": register_fabric,
    "lightning.pytorch.strategies": register_trainer,
    "lightning.fabric.connector": patch_fabric,
    "lightning.pytorch.trainer.connectors.accelerator_connector": patch_trainer,
    "lightning.pytorch.trainer.connectors.data_connector": keep_order,
}


def arm() -> None:
    """Have Lightning know us where the environment's hook is off."""
    global _armed
    if not _armed:
        _armed = True
        for name, add in TARGETS.items():
            on_import(name, add)
