"""Arm what lets stock scripts see the ``"axonn"`` block of DeepSpeed's configuration, Megatron's flags and the backend ``pccl``.

Accelerate and the HF Trainer pass that configuration on; what they count themselves is patched as well. Lightning learns
the strategy ``"axonn"``.

Standard library only: this runs at every ``import torch`` of the environment. Nothing of a host or of ours is imported
until a configuration that holds the block or a flag is parsed, and nothing is compiled until a pccl group is made.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def _patch_deepspeed(module: ModuleType) -> None:
    from axonn_plugins.hosts.deepspeed.patch import patch

    patch(module)


def _arm_megatron(module: ModuleType) -> None:
    from axonn_plugins.hosts.megatron.patch import arm

    arm(module)


def _register_backend(module: ModuleType) -> None:
    from axonn_plugins.pccl import register

    register()


def _patch_accelerate(module: ModuleType) -> None:
    from axonn_plugins.hosts.transformers.accelerate_patch import patch

    patch(module)


def _patch_trainer(module: ModuleType) -> None:
    if find_spec("accelerate") is None:  # Without it there are models, but no Trainer.
        return
    from axonn_plugins.hosts.transformers import trainer_patch

    parts = {
        "transformers.integrations.deepspeed": trainer_patch.patch_configuration,
        "transformers.training_args": trainer_patch.patch_arguments,
        "transformers.trainer": trainer_patch.patch_trainer,
    }
    parts[module.__name__](module)


def _patch_loading(module: ModuleType) -> None:
    from axonn_plugins.hosts.transformers.loading import patch

    patch(module)


def _patch_generation(module: ModuleType) -> None:
    from axonn_plugins.hosts.transformers.generation import patch

    patch(module)


def _patch_lightning(module: ModuleType) -> None:
    from axonn_plugins.hosts.lightning import patch

    patch.TARGETS[module.__name__](module)


def _patch_peft(module: ModuleType) -> None:
    from axonn_plugins.hosts.transformers.peft_patch import patch

    patch(module)


def _patch_swaps(module: ModuleType) -> None:
    from axonn_plugins.hosts.transformers.peft_patch import patch_swaps

    patch_swaps(module)


def _patch_averages(module: ModuleType) -> None:
    from axonn_plugins.hosts.transformers.averages import patch

    patch(module)


_TARGETS = {
    "torch.distributed.distributed_c10d": _register_backend,
    "deepspeed.runtime.config": _patch_deepspeed,
    "megatron.training.arguments": _arm_megatron,
    "accelerate.accelerator": _patch_accelerate,
    "transformers.integrations.deepspeed": _patch_trainer,
    "transformers.modeling_utils": _patch_loading,
    "transformers.generation.utils": _patch_generation,
    "transformers.training_args": _patch_trainer,
    "transformers.trainer": _patch_trainer,
    "lightning.fabric.strategies": _patch_lightning,
    "lightning.pytorch.strategies": _patch_lightning,
    "lightning.fabric.connector": _patch_lightning,
    "lightning.pytorch.trainer.connectors.accelerator_connector": _patch_lightning,
    "lightning.fabric.strategies.deepspeed": _patch_lightning,
    "lightning.pytorch.strategies.deepspeed": _patch_lightning,
    "lightning.pytorch.utilities.grads": _patch_lightning,
    "lightning.pytorch.tuner.lr_finder": _patch_lightning,
    "lightning.pytorch.utilities.model_summary.model_summary": _patch_lightning,
    "litgpt.args": _patch_lightning,
    "litgpt.pretrain": _patch_lightning,
    "litgpt.finetune.full": _patch_lightning,
    "litgpt.finetune.lora": _patch_lightning,
    "litgpt.finetune.adapter": _patch_lightning,
    "litgpt.finetune.adapter_v2": _patch_lightning,
    "peft.peft_model": _patch_peft,
    "peft.utils.hotswap": _patch_swaps,
    "trl.trainer.callbacks": _patch_averages,
}


class _Finder(MetaPathFinder):
    """Waits for the modules that we add to, does so once each has run, and leaves.

    One that runs already, and in doing so imported torch, has run when something is imported later.
    """

    def __init__(self, targets: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self.waiting = {name: add for name, add in targets.items() if name not in sys.modules}
        self.running = {name: add for name, add in targets.items() if _runs(name)}

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        for name in [name for name in self.running if not _runs(name)]:
            add = self.running.pop(name)
            if name in sys.modules:
                add(sys.modules[name])
        if fullname not in self.waiting:
            return None
        # The first that is asked finds the module for all, in the order in which they came.
        finders = [one for one in reversed(sys.meta_path) if isinstance(one, _Finder) and fullname in one.waiting]
        adds = [finder.waiting.pop(fullname) for finder in finders]
        for finder in finders:
            if not finder.waiting and not finder.running:
                sys.meta_path.remove(finder)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, adds)
        return spec


def _runs(name: str) -> bool:
    """True if a module is being imported now."""
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


class _MegatronOnCpu(MetaPathFinder):
    """Makes torch ready for Megatron on a CPU when the first of its modules is asked for, and leaves."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname == "megatron":
            sys.meta_path.remove(self)
            from axonn_plugins.hosts.megatron.cpu import enable

            enable()
        return None


class _Loader(Loader):
    def __init__(self, inner: Any, adds: Sequence[Callable[[ModuleType], None]]) -> None:
        self.inner, self.adds = inner, adds

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        for add in self.adds:
            add(module)


def activate() -> None:
    """Make DeepSpeed and Megatron obey us and torch know pccl; harmless when called again. ``AXONN_PLUGINS=0`` turns it off."""
    if os.environ.get("AXONN_PLUGINS") == "0":
        return
    for name, add in _TARGETS.items():
        if name in sys.modules and not _runs(name):
            add(sys.modules[name])
    if any(name not in sys.modules or _runs(name) for name in _TARGETS) and not any(
        isinstance(f, _Finder) for f in sys.meta_path
    ):
        sys.meta_path.insert(0, _Finder(_TARGETS))
    if os.environ.get("AXONN_MEGATRON_CPU") == "1" and not any(isinstance(f, _MegatronOnCpu) for f in sys.meta_path):
        sys.meta_path.insert(0, _MegatronOnCpu())


def on_import(name: str, add: Callable[[ModuleType], None]) -> None:
    """Add to a module once it is imported, or now if it has been."""
    if name in sys.modules and not _runs(name):
        add(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder({name: add}))
