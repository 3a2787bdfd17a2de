"""The ``"samo"`` key of the ``"axonn"`` block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, WrapValidator, field_validator
from pydantic_core import PydanticCustomError

from axonn_plugins.config.base import Block, ConfigError, Size


class EarlyBird(Block):
    """When an early-bird ticket counts as found (You et al., arXiv 1909.11957)."""

    interval: Size = Field(100, description="Steps from one look at the weights to the next.")
    window: Size = Field(5, description="How many earlier masks the newest is compared with.")
    epsilon: float = Field(
        0.1,
        gt=0,
        le=1,
        description="The share of prunable weights in which each of these masks may differ from the newest, at most.",
    )

    @field_validator("epsilon", mode="before")
    @classmethod
    def _distance(cls, value: Any) -> Any:
        if _is_number(value) and 0 < value <= 1:
            return value
        raise PydanticCustomError("epsilon", "a share above 0 and up to 1, such as 0.1")


class Pruner(Block):
    """A pruner with settings: one of these keys."""

    mask: str | None = Field(
        None, description="A file of masks by parameter name, by samo.write_masks, or in safetensors or by torch.save."
    )
    early_bird: EarlyBird | None = Field(None, description="The search for a ticket, with settings.")


def _pruner(value: Any, either: Any) -> Any:
    if value in ("magnitude", "early_bird"):
        return value
    if isinstance(value, Mapping) and set(Pruner.given_keys(value)) in ({"mask"}, {"early_bird"}):
        return Pruner.model_validate(value)
    raise PydanticCustomError("pruner", '"magnitude", "early_bird", {"early_bird": {...}} or {"mask": "FILE"}')


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Samo(Block):
    """SAMO: a pruned network trained with the state of its kept weights only (dissertation chapter 4)."""

    sparsity: float | None = Field(
        None,
        ge=0,
        le=1,
        description="The share of prunable weights that is pruned. A mask file needs none; if one is given, the file must agree "
        "to 0.01.",
    )
    pruner: Annotated[
        Literal["magnitude", "early_bird"] | Pruner,
        WrapValidator(_pruner, json_schema_input_type=Literal["magnitude", "early_bird"] | Pruner),
    ] = Field(
        "magnitude",
        description="magnitude: the smallest weights as they are at start_step. early_bird: the model trains dense until the mask "
        "of the smallest weights has settled; with settings: {early_bird: {interval, window, epsilon}}. {mask: FILE}: masks from a file.",
    )
    scope: Literal["global", "layer"] = Field(
        "layer",
        description="layer: of each parameter its smallest weights are pruned. global: the smallest of all prunable weights together, which "
        "can take layers of small weights away whole; then the run is refused.",
    )
    include: list[str] | None = Field(
        None,
        description="Patterns of parameter names, of which only these are pruned, tables of embeddings too. By default all matrices and "
        "convolutions but tables of embeddings. Not for a mask file.",
    )
    exclude: list[str] | None = Field(
        None, description="Patterns of parameter names that are not pruned. Not for a mask file."
    )
    start_step: int = Field(
        0,
        ge=0,
        description="Optimizer steps of dense training before the model is pruned, or before the search for a ticket begins.",
    )
    shard: bool = Field(
        False, description="Split the compressed state over the data-parallel ranks, as ZeRO-1 does with dense state."
    )

    @field_validator("sparsity", mode="before")
    @classmethod
    def _share(cls, value: Any) -> Any:
        if value is None or (_is_number(value) and 0 <= value <= 1):
            return value
        raise PydanticCustomError("sparsity", "a share of the weights from 0 to 1, such as 0.9")

    @field_validator("include", "exclude", mode="before")
    @classmethod
    def _patterns(cls, value: Any) -> Any:
        if value is None or (isinstance(value, list) and value and all(isinstance(name, str) for name in value)):
            return value
        raise PydanticCustomError("patterns", 'a list of patterns of parameter names such as ["*.fc1.weight"]')

    @field_validator("start_step", mode="before")
    @classmethod
    def _steps(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        raise PydanticCustomError("steps", "a number of steps of at least 0")

    @property
    def search(self) -> EarlyBird | None:
        """The settings of the search for a ticket; None: another pruner."""
        given = self.pruner
        return (
            given.early_bird
            if isinstance(given, Pruner)
            else EarlyBird.model_validate({})
            if given == "early_bird"
            else None
        )

    @property
    def mask(self) -> str | None:
        """The file of masks; None: another pruner."""
        return self.pruner.mask if isinstance(self.pruner, Pruner) else None

    def require_whole(self) -> None:
        """Refuse keys that do not go together.

        Raises:
            ConfigError: the first.
        """
        if self.mask is None and self.sparsity is None:
            raise ConfigError("axonn.samo.sparsity is missing; add it to axonn.samo, or give a mask file as its pruner")
        for key in ("include", "exclude", "scope"):
            if self.mask is not None and key in self.model_fields_set:
                raise ConfigError(
                    f"axonn.samo.{key} does not go with a mask file, which says itself what is pruned; remove one of them"
                )
