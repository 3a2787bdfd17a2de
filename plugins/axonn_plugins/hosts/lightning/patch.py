"""Changes to Lightning, and their time: the name ``"axonn"``, the class that `AxonnStrategy` becomes, LitGPT's switch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from types import ModuleType
from typing import Any

from axonn_plugins.autoload import on_import

_armed = False
_OURS = "axonn_plugins.hosts.lightning.strategy"


def register_fabric(module: ModuleType) -> None:
    """Add to ``lightning.fabric.strategies``; harmless when called again."""
    module.STRATEGY_REGISTRY.register("axonn", _named, description=_DESCRIPTION, override=True)


def register_trainer(module: ModuleType) -> None:
    """Add to ``lightning.pytorch.strategies``; harmless when called again."""
    module.StrategyRegistry.register("axonn", _named, description=_DESCRIPTION, override=True)


_DESCRIPTION = (
    "3D parallel matrix multiplication: by default weights and data over all devices; AXONN_STRATEGY gives sizes"
)


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
    ours = sys.modules.get(_OURS)
    if ours is not None and isinstance(strategy, ours.AxonnStrategy):
        from axonn_plugins.hosts.lightning.replicas import keep_order

        keep_order()
        strategy.become(kind())


def _patch_deepspeed(module: ModuleType) -> None:
    from axonn_plugins.hosts.lightning import deepspeed

    deepspeed.patch(module)


def _patch_script(module: ModuleType) -> None:
    from axonn_plugins.hosts.lightning import litgpt

    litgpt.patch_script(module)


def _patch_args(module: ModuleType) -> None:
    from axonn_plugins.hosts.lightning import litgpt

    litgpt.patch_args(module)


def _patch_grads(module: Any) -> None:
    original = module.grad_norm
    if getattr(original, "axonn", False):
        return

    @wraps(original)
    def grad_norm(*given: Any, **named: Any) -> Any:
        """Lightning's own, of the serial model."""
        if _OURS not in sys.modules:
            return original(*given, **named)
        from axonn_plugins.hosts.lightning.norms import grad_norms

        return grad_norms(original, *given, **named)

    grad_norm.axonn = True  # type: ignore[attr-defined]
    module.grad_norm = grad_norm


def _patch_finder(module: Any) -> None:
    callback = module._LRCallback
    original = callback.on_train_batch_end
    if getattr(original, "axonn", False):
        return

    @wraps(original)
    def on_train_batch_end(self: Any, trainer: Any, model: Any, outputs: Any, *rest: Any, **named: Any) -> None:
        """Lightning's own, by the mean loss of all readers."""
        ours = sys.modules.get(_OURS)
        if ours is not None and isinstance(trainer.strategy, ours.AxonnStrategy) and outputs:
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
            outputs = {"loss": trainer.strategy.reduce(loss.detach().clone())}
        original(self, trainer, model, outputs, *rest, **named)

    on_train_batch_end.axonn = True  # type: ignore[attr-defined]
    callback.on_train_batch_end = on_train_batch_end


def _patch_summary(module: Any) -> None:
    for kind, names in {
        module.LayerSummary: ["num_parameters"],
        module.ModelSummary: ["total_parameters", "trainable_parameters"],
    }.items():
        for name in names:
            setattr(kind, name, property(_of_serial(vars(kind)[name].fget)))


def _of_serial(original: Any) -> Any:
    if getattr(original, "axonn", False):
        return original

    @wraps(original)
    def count(self: Any) -> Any:
        """Lightning's own, of the serial model."""
        module = self._module if hasattr(self, "_module") else self._model
        if not any(hasattr(parameter, "axonn_layout") for parameter in module.parameters()):
            return original(self)
        from axonn_plugins.hosts.common.split_states import whole_shapes

        with whole_shapes(module):
            return original(self)

    count.axonn = True  # type: ignore[attr-defined]
    return count


TARGETS: dict[str, Callable[[ModuleType], None]] = {
    "lightning.fabric.strategies": register_fabric,
    "lightning.pytorch.strategies": register_trainer,
    "lightning.fabric.connector": patch_fabric,
    "lightning.pytorch.trainer.connectors.accelerator_connector": patch_trainer,
    "lightning.fabric.strategies.deepspeed": _patch_deepspeed,
    "lightning.pytorch.strategies.deepspeed": _patch_deepspeed,
    "lightning.pytorch.utilities.grads": _patch_grads,
    "lightning.pytorch.tuner.lr_finder": _patch_finder,
    "lightning.pytorch.utilities.model_summary.model_summary": _patch_summary,
    "litgpt.args": _patch_args,
    "litgpt.pretrain": _patch_script,
    "litgpt.finetune.full": _patch_script,
    "litgpt.finetune.lora": _patch_script,
    "litgpt.finetune.adapter": _patch_script,
    "litgpt.finetune.adapter_v2": _patch_script,
}


def arm() -> None:
    """Have Lightning know us where the environment's hook is off."""
    global _armed
    if not _armed:
        _armed = True
        for name, add in TARGETS.items():
            on_import(name, add)
