"""Additions to modules once they are imported."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from axonn_plugins.autoload import on_import


def _add(module: ModuleType, number: int) -> None:
    module.added.append(number)


def test_all_that_is_to_be_added_to_a_module_is_added_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "waited_for.py").write_text("added = []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    for number in range(3):
        on_import("waited_for", partial(_add, number=number))
    assert importlib.import_module("waited_for").added == [0, 1, 2]
    on_import("waited_for", partial(_add, number=3))
    assert sys.modules.pop("waited_for").added == [0, 1, 2, 3]
    assert sys.meta_path == before
