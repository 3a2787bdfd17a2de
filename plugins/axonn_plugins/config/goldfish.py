"""The ``"goldfish"`` key of the ``"axonn"`` block."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WrapValidator, field_validator
from pydantic_core import PydanticCustomError

from axonn_plugins.config.base import Block

_LARGE = 2**63
"""Integers of torch's are below."""


def _place(value: Any, either: Any) -> Any:
    if (isinstance(value, str) and value) or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise PydanticCustomError("labels", 'the name of an argument such as "labels", or its place, counted from 0')


class Goldfish(Block):
    """The goldfish loss, against memorization (Hans et al., arXiv 2406.10209): one of k targets is left out of the loss."""

    k: int = Field(ge=2, lt=_LARGE, description="One of so many targets is left out.")
    h: int = Field(
        13, ge=1, lt=_LARGE, description="A target is left out by the hash of so many targets, itself the last of them."
    )
    strategy: Literal["hash", "ordered_hash", "static", "seeded"] = Field(
        "hash",
        description="hash: as published, by the product of h targets, which does not see their order and is 0 with any id 0. ordered_hash: "
        "by a sum that sees both. static: every k-th target of a row. seeded: by the place in the row.",
    )
    seed: int = Field(
        2971215073, ge=0, lt=_LARGE, description="Of the table of what is drawn; by default the published one."
    )
    labels: Annotated[str | int, WrapValidator(_place)] = Field(
        "labels",
        description="The argument of the model's forward that has the labels, by name or place. For a PipelineModule whose labels are several "
        "tensors, the place of the one.",
    )
    shifts: bool | None = Field(
        None,
        description="Whether the model shifts labels by one itself, so that the first of a row is no target. By default true for causal "
        "models of transformers, false for all others.",
    )
    evaluation: bool = Field(False, description="Whether targets are left out in evaluation, too.")

    @field_validator("k", "h", "seed", mode="before")
    @classmethod
    def _number(cls, value: Any, info: Any) -> Any:
        least = {"k": 2, "h": 1, "seed": 0}[info.field_name]
        if isinstance(value, int) and not isinstance(value, bool) and least <= value < _LARGE:
            return value
        limit = "" if not isinstance(value, int) or value < _LARGE else " and below 2**63"
        raise PydanticCustomError("number", f"an integer of at least {least}{limit}")  # type: ignore[arg-type]
