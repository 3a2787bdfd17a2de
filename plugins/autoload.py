"""Arm what lets stock scripts see the ``"axonn"`` block of DeepSpeed's configuration, and the backend ``pccl``.

Standard library only: this runs at every ``import torch`` of the environment. Nothing of DeepSpeed or of ours is
imported until a configuration that holds the block is parsed, and nothing is compiled until a pccl group is made.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def _patch_deepspeed(module: ModuleType) -> None:
    from plugins.deepspeed.patch import patch

    patch(module)


def _register_backend(module: ModuleType) -> None:
    from plugins.pccl import register

    register()


_TARGETS = {"torch.distributed.distributed_c10d": _register_backend, "deepspeed.runtime.config": _patch_deepspeed}


class _Finder(MetaPathFinder):
    """Waits for the modules that we add to, does so once each has run, and leaves."""

    def __init__(self) -> None:
        self.waiting = {name for name in _TARGETS if name not in sys.modules}

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        self.waiting.remove(fullname)
        if not self.waiting:
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        _TARGETS[module.__name__](module)


def activate() -> None:
    """Make DeepSpeed obey the block and torch know pccl; harmless when called again. ``AXONN_PLUGINS=0`` turns it off."""
    if os.environ.get("AXONN_PLUGINS") == "0":
        return
    for name, add in _TARGETS.items():
        if name in sys.modules:
            add(sys.modules[name])
    if any(name not in sys.modules for name in _TARGETS) and not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
