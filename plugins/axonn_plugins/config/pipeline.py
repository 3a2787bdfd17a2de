"""The ``"pipeline"`` key of the ``"axonn"`` block."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WrapValidator
from pydantic_core import PydanticCustomError

from axonn_plugins.config.base import Block


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _limit(value: Any, either: Any) -> Any:
    if value == "auto" or _is_count(value):
        return value
    raise PydanticCustomError("limit", 'a number of microbatches of at least 1, or "auto"')


def _checkpointing(value: Any, either: Any) -> Any:
    if value is None or value is False or value == "auto" or _is_count(value):
        return value
    raise PydanticCustomError("checkpointing", 'a number of layers of at least 1, "auto" or false')


class Pipeline(Block):
    """The message-driven pipeline for a deepspeed.pipe.PipelineModule (dissertation chapter 3)."""

    schedule: Literal["message_driven", "1f1b", "gpipe"] = Field(
        "message_driven",
        description="message_driven: a stage works on whatever has arrived, forward or backward. 1f1b: in DeepSpeed's fixed order. gpipe: all "
        "forward passes, then all backward passes. Messages are asynchronous in all three.",
    )
    pipeline_limit: Annotated[
        int | Literal["auto"],
        WrapValidator(_limit, json_schema_input_type=Annotated[int, Field(ge=1)] | Literal["auto"]),
    ] = Field(
        "auto",
        description="Microbatches in the pipeline at most, which is also the number of activations that a stage keeps at most. auto: twice as "
        "many as stages, which hides slow links and uneven stages; in 1f1b as many as stages, in gpipe all. The number of stages is the "
        "dissertation's choice, and takes half the memory.",
    )
    activation_checkpointing: Annotated[
        int | Literal["auto", False] | None,
        WrapValidator(
            _checkpointing,
            json_schema_input_type=Annotated[int, Field(ge=1)] | Literal["auto", False] | None,
        ),
    ] = Field(
        None,
        description="Layers from one kept activation to the next; the others are computed again in backward. auto: the factor of a stage's "
        "layers that is nearest the square root of all layers. false: none. By default what the PipelineModule says.",
    )
    deterministic: bool = Field(
        False,
        description="Run torch's deterministic algorithms, so that two runs give the same bits on an accelerator, too; operations that have none "
        "warn. The order in which gradients are summed is fixed in any case: that of microbatches.",
    )
