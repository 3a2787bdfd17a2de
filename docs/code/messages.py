"""Errors and their remedies, from the source: sentences that name a setting, why it is refused, and what to do."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from texts import ROOT

GROUPS = {
    "Keys of the block": ("plugins/axonn_plugins/config",),
    "Under DeepSpeed": ("plugins/axonn_plugins/hosts/deepspeed", "plugins/axonn_plugins/hosts/common"),
    "HF Trainer and Accelerate": ("plugins/axonn_plugins/hosts/transformers",),
    "Lightning, Fabric, LitGPT": ("plugins/axonn_plugins/hosts/lightning",),
    "Megatron": ("plugins/axonn_plugins/hosts/megatron",),
    "torchtitan": ("plugins/axonn_plugins/hosts/torchtitan",),
    "Splitting a model, and its checkpoints": ("axonn_tp",),
    "Mixtures of experts": ("ted_moe",),
    "Pruned networks": ("samo", "plugins/axonn_plugins/samo"),
    "Collectives": ("plugins/axonn_plugins/pccl",),
    "Pipelines": ("plugins/axonn_plugins/pipeline",),
    "The planner": ("plugins/axonn_plugins/planner",),
    "Converting and generating": ("plugins/axonn_plugins/weights",),
}
"""Headings, and the folders whose errors stand below them."""
_DESCRIBED = ("Field", "arg", "Command")
"""Calls whose texts describe a key or an option, and are no errors."""
SHORTEST = 40
"""Characters of the shortest sentence that is taken to be one."""


def sentences(file: Path) -> Iterator[str]:
    """Errors of a file, with … for what is put in when they are raised."""
    tree = _tree(file)
    known, nodes = everywhere() | _constants(tree), list(ast.walk(tree))
    no_errors = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    no_errors |= {id(part) for node in nodes if _describes(node) for part in ast.walk(node)}
    inside = {
        id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part is not node
    }
    for node in nodes:
        if id(node) in no_errors or id(node) in inside:
            continue
        whole = isinstance(node, ast.JoinedStr)
        plain = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if whole or plain:
            said = " ".join(template(node, known).split())
            if len(said) >= SHORTEST and "; " in said and not said.startswith(("import ", "..", "usage")):
                yield said


def _describes(node: ast.AST) -> bool:
    """True for a call such as ``Field(description=...)``."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", None)) in _DESCRIBED


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def template(node: ast.AST, known: Mapping[str, str]) -> str:
    """A string's words, `known` constants among them."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.JoinedStr)
    return "".join(str(part.value) if isinstance(part, ast.Constant) else _put_in(part, known) for part in node.values)


def _put_in(part: ast.AST, known: Mapping[str, str]) -> str:
    value = part.value if isinstance(part, ast.FormattedValue) else None
    return known.get(value.id, "…") if isinstance(value, ast.Name) else "…"


def _constants(tree: ast.Module) -> dict[str, str]:
    """A module's constants that are strings."""
    return {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id.isupper()
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


@cache
def everywhere() -> dict[str, str]:
    """Constants of all folders whose names have one value."""
    found = defaultdict(set)
    for folder in (one for some in GROUPS.values() for one in some):
        for file in (ROOT / folder).rglob("*.py"):
            for name, value in _constants(_tree(file)).items():
                found[name].add(value)
    return {name: next(iter(values)) for name, values in found.items() if len(values) == 1}


def section(title: str) -> list[str]:
    """A table of what is said, and what to do: what stands behind the first semicolon."""
    found = [
        said for folder in GROUPS[title] for file in sorted((ROOT / folder).rglob("*.py")) for said in sentences(file)
    ]
    rows = []
    for said in sorted(set(found), key=str.lower):
        what, _, remedy = said.partition("; ")
        rows.append(
            "| "
            + " | ".join(one.replace("|", "\\|").replace("`", "'").replace("<", "&lt;") for one in (what, remedy))
            + " |"
        )
    return [f"## {title}", "", "| what it says | what to do |", "|---|---|", *rows, ""]


def tables() -> str:
    """All of them in Markdown."""
    return "\n".join(line for title in GROUPS for line in section(title))
