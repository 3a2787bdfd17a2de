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
        description="The ticket is found when each of these masks differs from the newest in less than this share of the prunable weights.",
    )

    @field_validator("epsilon", mode="before")
    @classmethod
    def _distance(cls, value: Any) -> Any:
        if _is_number(value) and 0 < value <= 1:
            return value
        raise PydanticCustomError("epsilon", "a share above 0 and up to 1, such as 0.1")


class Random(Block):
    """Weights drawn at random."""

    seed: int = Field(0, ge=0, lt=2**31, description="Of the draw, the same on any ranks.")


class Snip(Block):
    """Scores by the first gradients (Lee et al., arXiv 1810.02340)."""

    batches: Size = Field(
        1,
        description="Batches, from start_step on, whose gradients are taken and which move no weight; then the model is pruned.",
    )


class Pruner(Block):
    """A pruner with settings: one of these keys."""

    mask: str | None = Field(
        None, description="A file of masks by parameter name, by samo.write_masks, or in safetensors or by torch.save."
    )
    early_bird: EarlyBird | None = Field(None, description="The search for a ticket, with settings.")
    n_of_m: list[int] | None = Field(
        None, description="[n, m]: of each m consecutive inputs the n largest weights are kept, such as [2, 4]."
    )
    random: Random | None = Field(None, description="Weights drawn at random, with their seed.")
    snip: Snip | None = Field(
        None, description="The weights that change the loss least, by the first batches' gradients."
    )

    @field_validator("n_of_m", mode="before")
    @classmethod
    def _pattern(cls, value: Any) -> Any:
        numbers = isinstance(value, list) and len(value) == 2 and all(type(one) is int for one in value)
        if numbers and 1 <= value[0] <= value[1]:
            return value
        raise PydanticCustomError("n_of_m", "[n, m] with 1 <= n <= m, such as [2, 4]")


class Regrow(Block):
    """Regrowth (RigL; Evci et al., arXiv 1911.11134)."""

    end_step: Size = Field(description="Optimizer steps after which no more regrows.")
    interval: Size = Field(
        100,
        description="Steps, from start_step on, from one regrowth to the next: the next step's gradients choose what regrows, and it moves no weight.",
    )
    fraction: float = Field(
        0.3,
        gt=0,
        le=1,
        description="Share of a parameter's kept weights that is replaced at the first regrowth; it falls as a cosine.",
    )


class Heads(Block):
    """Attention heads that are pruned whole."""

    heads: Size = Field(
        description="Heads of an attention, one after the other in the features of the layers that are named."
    )
    rows: list[str] = Field(
        description="Patterns of weights whose outputs are the heads', such as *.q_proj.weight; not those of keys and values that several heads share."
    )
    columns: list[str] = Field(description="Patterns of weights whose inputs are the heads', such as *.o_proj.weight.")


def _structure(value: Any, either: Any) -> Any:
    if value is None or value == "channel":
        return value
    if isinstance(value, Mapping):
        return Heads.model_validate(value)
    raise PydanticCustomError(
        "structure", '"channel" or {"heads": 12, "rows": ["*.q_proj.weight"], "columns": ["*.o_proj.weight"]}'
    )


_NAMES = ("magnitude", "early_bird", "random", "snip", "nonzero")


class Schedule(Block):
    """Sparsity that grows from one pruning to the next (Zhu & Gupta, arXiv 1710.01878)."""

    end_step: Size = Field(
        description="Optimizer steps after which the sparsity is reached and nothing more is pruned."
    )
    interval: Size = Field(100, description="Steps from one pruning to the next, from start_step on.")
    initial: float = Field(0.0, ge=0, le=1, description="Sparsity of the first pruning, at start_step.")
    shape: Literal["cubic", "linear"] = Field(
        "cubic", description="cubic: fast at first, as published. linear: evenly."
    )


def _pruner(value: Any, either: Any) -> Any:
    if value in _NAMES:
        return value
    if (
        isinstance(value, Mapping)
        and len(given := Pruner.given_keys(value)) == 1
        and set(given) <= set(Pruner.model_fields)
    ):
        return Pruner.model_validate(value)
    if value == "grasp" or (isinstance(value, Mapping) and "grasp" in value):
        raise PydanticCustomError(
            "pruner",
            "a pruner of the block, which has the gradients that a host's backward leaves, and GraSP differentiates the loss twice: find masks of the "
            'whole model by samo.grasp, write them by samo.write_masks, and give {"mask": "FILE"}',
        )
    raise PydanticCustomError(
        "pruner",
        '"magnitude", "early_bird", "random", "snip", "nonzero", {"early_bird": {...}}, {"random": {"seed": 1}}, {"snip": {"batches": 4}}, '
        '{"n_of_m": [2, 4]} or {"mask": "FILE"}',
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Samo(Block):
    """SAMO: a pruned network trained with the state of its kept weights only (dissertation chapter 4)."""

    sparsity: float | None = Field(
        None,
        ge=0,
        le=1,
        description="The share of prunable weights, which are trained matrices and convolutions, that is pruned. "
        "With a mask file it may be left out, and else must agree with the file to 0.01. Not with n_of_m or nonzero.",
    )
    pruner: Annotated[
        Literal["magnitude", "early_bird", "random", "snip", "nonzero"] | Pruner,
        WrapValidator(
            _pruner, json_schema_input_type=Literal["magnitude", "early_bird", "random", "snip", "nonzero"] | Pruner
        ),
    ] = Field(
        "magnitude",
        description="magnitude: the smallest weights as they are at start_step. early_bird: the model trains dense until the mask "
        "of the smallest weights has settled; with settings: {early_bird: {interval, window, epsilon}}. random, {random: {seed}}: weights drawn. "
        "snip, {snip: {batches}}: those that change the loss least. {n_of_m: [n, m]}: n of m consecutive inputs are kept. nonzero: "
        "the model comes pruned, and its zeros stay. {mask: FILE}: masks "
        "from a file.",
    )
    scope: Literal["global", "layer"] = Field(
        "layer",
        description="layer: of each parameter its smallest weights are pruned. global: the smallest of all prunable weights together, which "
        "can take layers of small weights away whole; then the run is refused. Not with a mask file, n_of_m, nonzero or structure.",
    )
    structure: Annotated[
        Literal["channel"] | Heads | None,
        WrapValidator(_structure, json_schema_input_type=Literal["channel"] | Heads | None),
    ] = Field(
        None,
        description="channel: whole outputs of each layer are pruned by their norms. {heads, rows, columns}: whole heads of each attention, and no "
        "other weights. By default single weights. With the pruner magnitude only.",
    )
    include: list[str] | None = Field(
        None,
        description="Patterns of parameter names, of which only these are pruned, tables of embeddings and routers too. By default all "
        "matrices and convolutions of more than one row and column but tables of embeddings and routers of mixtures of experts. Not with a mask "
        "file or whole heads.",
    )
    exclude: list[str] | None = Field(
        None, description="Patterns of parameter names that are not pruned. Not with a mask file or whole heads."
    )
    start_step: int = Field(
        0,
        ge=0,
        description="Optimizer steps of dense training before the model is pruned, or before the search for a ticket begins.",
    )
    schedule: Schedule | None = Field(
        None,
        description="Sparsity grows to that of the key sparsity, a pruning at a time, from start_step to end_step. With the pruners magnitude "
        "and random only.",
    )
    regrow: Regrow | None = Field(
        None,
        description="The smallest of the kept weights give their places to pruned ones with the largest gradients, at constant sparsity. "
        "Not with schedule, structure or n_of_m.",
    )
    shard: bool = Field(
        False, description="Split the compressed state over the data-parallel ranks, as ZeRO-1 does with dense state."
    )

    report: str | None = Field(
        None,
        min_length=1,
        description="A JSON file that rank 0 writes whenever the model is pruned: of each parameter the shape, the elements and how many are kept.",
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
        return self._settings("early_bird", EarlyBird)

    @property
    def random(self) -> Random | None:
        """The settings of a random draw; None: another pruner."""
        return self._settings("random", Random)

    @property
    def snip(self) -> Snip | None:
        """The settings of scores by first gradients; None: another pruner."""
        return self._settings("snip", Snip)

    def _settings(self, name: str, kind: type[Any]) -> Any:
        if isinstance(self.pruner, Pruner):
            return getattr(self.pruner, name)
        return kind.model_validate({}) if self.pruner == name else None

    @property
    def mask(self) -> str | None:
        """The file of masks; None: another pruner."""
        return self.pruner.mask if isinstance(self.pruner, Pruner) else None

    @property
    def n_of_m(self) -> list[int] | None:
        """Kept of a group of inputs, and the group's size; None: another pruner."""
        return self.pruner.n_of_m if isinstance(self.pruner, Pruner) else None

    def require_whole(self) -> None:
        """Refuse keys that do not go together.

        Raises:
            ConfigError: the first.
        """
        if self.n_of_m is not None or self.pruner == "nonzero":
            given = "nonzero" if self.n_of_m is None else "n_of_m"
            for key in ("sparsity", "scope"):
                if key in self.model_fields_set:
                    raise ConfigError(
                        f"axonn.samo.{key} does not go with {given}, which says itself how much is pruned; remove {key}"
                    )
        elif self.mask is None and self.sparsity is None:
            raise ConfigError("axonn.samo.sparsity is missing; add it to axonn.samo, or give a mask file as its pruner")
        if self.sparsity == 1:
            raise ConfigError("axonn.samo.sparsity = 1 keeps nothing of any layer; use a lower share, such as 0.9")
        for key in ("include", "exclude", "scope"):
            if self.mask is not None and key in self.model_fields_set:
                raise ConfigError(
                    f"axonn.samo.{key} does not go with a mask file, which says itself what is pruned; remove one of them"
                )
        if self.structure is not None:
            self._require_structure(self.structure)
        if self.schedule is not None:
            self._require_growth(self.schedule)
        if self.regrow is not None:
            self._require_regrowth(self.regrow)

    def _require_growth(self, schedule: Schedule) -> None:
        if self.pruner != "magnitude" and self.random is None:
            raise ConfigError(
                'axonn.samo.schedule prunes again and again, so it goes with the pruners "magnitude" and "random" only; remove one of them'
            )
        if schedule.end_step <= self.start_step:
            raise ConfigError(
                f"axonn.samo.schedule.end_step = {schedule.end_step} is not after axonn.samo.start_step = {self.start_step}; use a later step"
            )
        if self.sparsity is not None and schedule.initial > self.sparsity:
            raise ConfigError(
                f"axonn.samo.schedule.initial = {schedule.initial} is more than axonn.samo.sparsity = {self.sparsity}, which the schedule ends "
                "with; use a smaller one"
            )

    def _require_regrowth(self, regrow: Regrow) -> None:
        other = "axonn.samo.schedule" if self.schedule is not None else "n_of_m" if self.n_of_m is not None else None
        if other is not None:
            raise ConfigError(
                f"axonn.samo.regrow keeps how many weights each parameter has and not where, which does not go with {other}; remove one of them"
            )
        if regrow.end_step <= self.start_step:
            raise ConfigError(
                f"axonn.samo.regrow.end_step = {regrow.end_step} is not after axonn.samo.start_step = {self.start_step}; use a later step"
            )

    def _require_structure(self, structure: str | Heads) -> None:
        if self.pruner != "magnitude":
            raise ConfigError(
                'axonn.samo.structure goes by norms, so with the pruner "magnitude" only; remove one of them'
            )
        for key in ("scope", "regrow") + (("include", "exclude") if isinstance(structure, Heads) else ()):
            if key in self.model_fields_set:
                raise ConfigError(
                    f"axonn.samo.{key} does not go with axonn.samo.structure, which says itself what goes together; remove one of them"
                )
