"""The house: who imports whom, and how long a file is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {name: ROOT / name for name in ("axonn_tp", "samo", "ted_moe")} | {
    "axonn_plugins": ROOT / "plugins" / "axonn_plugins",
    "axonn_recipes": ROOT / "recipes" / "axonn_recipes",
}
LONGEST = 350
GROUND = (
    "axonn_tp",
    "samo",
    "axonn_plugins.optim",
    "axonn_plugins.pccl",
    "axonn_plugins.planner",
    "axonn_plugins.config",
    "axonn_plugins.goldfish",
)
HOSTS = ("deepspeed", "megatron", "transformers", "accelerate", "lightning", "torchtitan", "axonn_plugins.hosts")


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDERS.items():
        for file in folder.rglob("*.py"):
            parts = [package, *file.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


def imports(file: Path, deferred: bool) -> Iterator[str]:
    """Imports of a file when it is imported itself, and, if asked, later."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree) if deferred else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that reach each other."""
    reached: dict[str, set[str]] = {}
    for start in edges:
        seen: set[str] = set()
        waiting = list(edges[start])
        while waiting:
            module = waiting.pop()
            if module not in seen:
                seen.add(module)
                waiting.extend(edges.get(module, ()))
        reached[start] = seen
    found = {tuple(sorted({a, *(b for b in reached[a] if a in reached.get(b, ()))})) for a in edges if a in reached[a]}
    return [list(circle) for circle in sorted(found)]


@pytest.mark.parametrize("package", FOLDERS)
def test_no_import_circles(package: str) -> None:
    """Of the ground also what is imported later; the plugins import hosts when these are there."""
    deferred = package in ("axonn_tp", "samo", "ted_moe")
    mine = {name: file for name, file in MODULES.items() if name.split(".")[0] == package}
    edges = {name: {other for other in imports(file, deferred) if other in mine} for name, file in mine.items()}
    assert circles(edges) == []


def test_the_ground_imports_no_host() -> None:
    for name, file in MODULES.items():
        if name.startswith(tuple(f"{ground}." for ground in GROUND)) or name in GROUND:
            wrong = [other for other in imports(file, deferred=False) if other.startswith(HOSTS)]
            assert not wrong, f"{name} imports {wrong}"


def test_the_ground_floor_stands_on_nothing() -> None:
    for name, file in MODULES.items():
        if name.split(".")[0] == "axonn_tp":
            above = [
                other for other in imports(file, deferred=True) if other.split(".")[0] in {*FOLDERS} - {"axonn_tp"}
            ]
            assert not above, f"{name} imports {above}"


def test_files_are_read_in_one_sitting() -> None:
    for file in MODULES.values():
        length, name = len(file.read_text().splitlines()), str(file.relative_to(ROOT))
        assert length <= LONGEST, f"{name} has {length} lines"


def test_what_of_deepspeed_is_replaced_is_listed() -> None:
    """Methods of its engines that ours have in their place, each with its reason in docs/design.md."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    from axonn_plugins.hosts.deepspeed.pipeline.engine import MessageDrivenEngine
    from axonn_plugins.hosts.deepspeed.ted.engine import TedEngine
    from axonn_plugins.hosts.deepspeed.ted.unit import TedUnitEngine

    stock = {name for kind in PipelineEngine.__mro__[:2] for name in vars(kind) if not name.startswith("__")}
    classes = {kind for engine in (MessageDrivenEngine, TedEngine, TedUnitEngine) for kind in engine.__mro__}
    ours = [kind for kind in classes if kind.__module__.startswith("axonn_plugins.")]
    replaced = {name for kind in ours for name in vars(kind)} & stock
    table = (ROOT / "docs" / "design.md").read_text().rpartition("| method | in | why |")[2].partition("\n## ")[0]
    listed = {
        name
        for row in table.splitlines()
        for name in re.findall(r"`(\w+)`", row.split("|")[1:2][0] if "|" in row else "")
    }
    assert replaced == listed
    assert len(replaced) < 15
