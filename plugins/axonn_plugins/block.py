"""What all parts of the ``"axonn"`` block share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class ConfigError(ValueError):
    """A mistake of the user's, in one sentence: the key, its value, what is allowed and what to do."""


class Block(BaseModel):
    """Base of all blocks: unknown keys and loose types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Size = Annotated[int, Field(ge=1)]
