"""Errors and their remedies, from the source: sentences that name a setting, why it is refused, and what to do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
SHORTEST = 40
"""Characters of the shortest sentence that is taken to be one."""


def sentences(file: Path) -> Iterator[str]:
    """Errors of a file, with … for what is put in when they are raised."""
    tree = ast.parse(file.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        whole = isinstance(node, ast.JoinedStr) and not (id(node) in inside and _nested(tree, node))
        plain = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside | docstrings
        if whole or plain:
            said = " ".join(template(node).split())
            if len(said) >= SHORTEST and "; " in said and not said.startswith(("import ", "..", "usage")):
                yield said


def _nested(tree: ast.AST, node: ast.JoinedStr) -> bool:
    """True if an f-string stands inside another one."""
    return any(
        isinstance(other, ast.FormattedValue) and any(one is node for one in ast.walk(other))
        for other in ast.walk(tree)
    )


def template(node: ast.AST) -> str:
    """A string's words."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.JoinedStr)
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


def section(title: str) -> list[str]:
    """A table of what is said, and what to do: what stands behind the last semicolon."""
    found = [
        said for folder in GROUPS[title] for file in sorted((ROOT / folder).rglob("*.py")) for said in sentences(file)
    ]
    rows = []
    for said in sorted(set(found), key=str.lower):
        what, _, remedy = said.rpartition("; ")
        rows.append(
            "| "
            + " | ".join(one.replace("|", "\\|").replace("`", "'").replace("<", "&lt;") for one in (what, remedy))
            + " |"
        )
    return [f"## {title}", "", "| what it says | what to do |", "|---|---|", *rows, ""]


def tables() -> str:
    """All of them in Markdown."""
    return "\n".join(line for title in GROUPS for line in section(title))
