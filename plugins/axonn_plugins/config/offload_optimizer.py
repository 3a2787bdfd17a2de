"""The ``"offload_optimizer"`` key of the ``"axonn"`` block."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from axonn_plugins.config.base import Block, Size


class OffloadOptimizer(Block):
    """Float32 weights and optimizer state in host memory, which visit the device in buckets (dissertation section 3.3)."""

    bucket_size: int = Field(
        16_000_000,
        ge=1024,
        description="Elements, of 16 bytes, that a step may have on the device beside the 16-bit weights and gradients.",
    )
    coarsening: Size = Field(
        4,
        description="Buckets whose gradients are averaged in one all-reduce, while backward goes on; where given, in the place "
        "of zero_optimization.reduce_bucket_size.",
    )

    @field_validator("bucket_size", mode="before")
    @classmethod
    def _large_enough(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1024:
            return value
        raise PydanticCustomError("bucket_size", "an integer of at least 1024")
