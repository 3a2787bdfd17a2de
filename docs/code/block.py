"""The reference of the ``"axonn"`` block, from the classes that check it."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic.fields import FieldInfo

from axonn_plugins.config import Axonn
from axonn_plugins.config.base import Block
from axonn_plugins.config.compose import CONFLICTS, SYSTEMS
from axonn_plugins.config.tensor_parallel import Layer, SharedZ

INTRODUCTION = """# The block

All keys of `"axonn"` in ds_config.json, made from the classes that check them. A key that is not given, or null, has its default. What is not
here is refused, with the nearest key; `axonn schema` prints the same as a JSON schema, by which an editor completes keys.

Sizes of a grid (`gx`, `gy`, `gz`) may be `"auto"`. Under Megatron the keys are [flags](../hosts/megatron.md), under Lightning and torchtitan
[arguments](../hosts/lightning.md).
"""


def blocks(annotation: Any) -> Iterator[type[Block]]:
    """Blocks that a key may hold."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from blocks(inner)


def kinds(annotation: Any) -> str:
    """The values that a key takes, in words."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return "object"
    names = {int: "integer", float: "number", str: "string", bool: "true or false", type(None): ""}
    if annotation in names:
        return names[annotation]
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in inner)
    if origin is typing.Annotated:
        return kinds(inner[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(filter(None, map(kinds, inner))))
    if origin is dict:
        return "object of patterns"
    if origin in (list, tuple):
        return "list"
    return "any"


def default(field: FieldInfo) -> str:
    """As it would be written."""
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    return "" if value is None else f"`{json.dumps(value, default=str)}`"


def table(block: type[Block]) -> list[str]:
    """Keys of one object."""
    rows = ["| key | takes | default | |", "|---|---|---|---|"]
    for name, field in block.model_fields.items():
        said = (field.description or "").replace("|", "\\|")
        rows.append(f"| `{name}` | {kinds(field.annotation).replace('|', chr(92) + '|')} | {default(field)} | {said} |")
    return rows


def page() -> str:
    """The whole reference in Markdown."""
    out = [INTRODUCTION, "## axonn", "", *table(Axonn), ""]
    extra = {"plan": [Layer], "gz": [SharedZ]}
    for system in SYSTEMS:
        annotation = Axonn.model_fields[system].annotation
        for block in blocks(annotation):
            out += [f"## {system}", "", (block.__doc__ or "").strip(), "", *table(block), ""]
            for name, field in block.model_fields.items():
                for below in dict.fromkeys([*blocks(field.annotation), *extra.get(name, [])]):
                    out += [f"### {system}: {name}", "", (below.__doc__ or "").strip(), "", *table(below), ""]
                    for inner, each in below.model_fields.items():
                        for last in blocks(each.annotation):
                            out += [
                                f"### {system}: {name}.{inner}",
                                "",
                                (last.__doc__ or "").strip(),
                                "",
                                *table(last),
                                "",
                            ]
    out += ["## Settings that contradict each other", "", "| of | with | refused, because |", "|---|---|---|"]
    out += [f"| `{one.keys[0]}` | `{one.keys[1]}` | {one.reason} |" for one in CONFLICTS]
    return "\n".join(out) + "\n"
