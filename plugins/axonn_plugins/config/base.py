"""Base classes of all parts of the ``"axonn"`` block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ConfigError(ValueError):
    """A mistake of the user's, in one sentence: the key, its value, what is allowed and what to do."""


class Block(BaseModel):
    """Base of all blocks: unknown keys and loose types are refused; a key whose value is null counts as not given."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="wrap")
    @classmethod
    def _without_nulls(cls, value: Any, validate: Any) -> Any:
        return validate(cls.given_keys(value) if isinstance(value, Mapping) else value)

    @classmethod
    def given_keys(cls, value: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a block that are given: all but nulls, where null is not a value of its own."""
        return {key: each for key, each in value.items() if each is not None or not cls._ignores_null(key)}

    @classmethod
    def _ignores_null(cls, key: str) -> bool:
        field = cls.model_fields.get(key)
        return field is not None and (field.default is None or type(None) not in get_args(field.annotation))


Size = Annotated[int, Field(ge=1)]
