"""Arm the hook that lets stock DeepSpeed scripts see the ``"axonn"`` block.

Standard library only: this runs at every ``import torch`` of the environment. Nothing of DeepSpeed or of ours is
imported until a configuration that holds the block is parsed.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_TARGET = "deepspeed.runtime.config"


class _Finder(MetaPathFinder):
    """Waits for DeepSpeed's config module, patches it once it has run, and leaves."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _TARGET:
            return None
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
        from plugins.deepspeed.patch import patch

        patch(module)


def activate() -> None:
    """Make DeepSpeed obey the ``"axonn"`` block; harmless when called again. ``AXONN_PLUGINS=0`` turns it off."""
    if os.environ.get("AXONN_PLUGINS") == "0":
        return
    if _TARGET in sys.modules:
        from plugins.deepspeed.patch import patch

        patch(sys.modules[_TARGET])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
