"""The settings of `AxonnStrategy`: sizes, plan and options, from arguments or from the environment."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from axonn_plugins import config
from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common import tensor_parallel
from axonn_tp import Grid, LayerPlan, Options

VARIABLE = "AXONN_STRATEGY"
"""The environment's arguments of the strategy ``"axonn"``, as JSON."""
_ARGUMENTS = ("gx", "gy", "gz", "plan", "options", "state_dict_type")
_TYPES = ("full", "sharded")


@dataclass(frozen=True)
class Settings:
    """Settings by which models are split and saved.

    Attributes:
        gx: ranks along x.
        gy: ranks along y.
        gz: ranks along z; None for all that x and y leave.
        plan: what layers become by name pattern, or ``"auto"``.
        options: of `axonn_tp.parallelize`.
        state_dict_type: of checkpoints, ``"full"`` or ``"sharded"``.
    """

    gx: int
    gy: int
    gz: int | None
    plan: Any
    options: Options
    state_dict_type: str

    @property
    def same(self) -> int:
        """Ranks in a row that read the same data."""
        return self.gx * self.gy

    def grid(self, world: int) -> Grid:
        """The grid of so many ranks.

        Raises:
            ConfigError: the sizes do not divide them.
        """
        try:
            if self.gz is not None:
                return Grid.for_world(world, self.gx, self.gy, self.gz)
            plane = Grid.for_world(world, self.gx, self.gy)
            return Grid(self.gx, self.gy, plane.gdata)
        except ValueError as error:
            raise ConfigError(f"AxonnStrategy: {error}") from None


def parse(gx: Any, gy: Any, gz: Any, plan: Any, options: Any, state_dict_type: Any) -> Settings:
    """Settings from arguments.

    Raises:
        ConfigError: the first mistake, in one sentence.
    """
    for axis, size in (("gx", gx), ("gy", gy), ("gz", gz)):
        if axis == "gz" and size == "all":
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            more = ', or "all" for all ranks that x and y leave' if axis == "gz" else ""
            raise ConfigError(f"AxonnStrategy({axis}={size!r}): give an integer of at least 1{more}")
    if state_dict_type not in _TYPES:
        raise ConfigError(
            f'AxonnStrategy(state_dict_type={state_dict_type!r}): give "full" for one file, or "sharded" for a folder of shards'
        )
    return Settings(gx, gy, None if gz == "all" else gz, _plan(plan), _options(options), state_dict_type)


def _plan(plan: Any) -> Any:
    if plan == "auto":
        return plan
    if not isinstance(plan, Mapping):
        raise ConfigError(
            f'AxonnStrategy(plan={plan!r}): give what layers become by name pattern, such as {{"*.fc1": "normal"}}, or "auto"'
        )
    told = {name: asdict(layer) if isinstance(layer, LayerPlan) else layer for name, layer in plan.items()}
    for layer in told.values():
        if isinstance(layer, dict) and isinstance(layer.get("counts"), tuple):
            layer["counts"] = list(layer["counts"])
    return tensor_parallel.layer_plans(_block({"plan": told}))


def _options(options: Any) -> Options:
    if options is None:
        return Options()
    if isinstance(options, Options):
        return options
    if not isinstance(options, Mapping):
        raise ConfigError(f"AxonnStrategy(options={options!r}): give a mapping, or an axonn_tp.Options")
    known = [field.name for field in fields(Options)]
    for key in options:
        if key not in known:
            raise ConfigError(f"AxonnStrategy(options={{{key!r}: ...}}) is not an option; {_nearest(key, known)}")
    own = options.keys() - config.TensorParallel.model_fields.keys()
    try:
        block = _block({key: value for key, value in options.items() if key not in own})
        chosen = tensor_parallel.options(block)
        return Options(**{**asdict(chosen), **{key: options[key] for key in own}})
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"AxonnStrategy: options: {error}") from None


def _block(given: dict[str, Any]) -> Any:
    try:
        return config.parse({"tensor_parallel": given}).tensor_parallel
    except ConfigError as error:
        raise ConfigError(str(error).replace("axonn.tensor_parallel.", "AxonnStrategy: ")) from None


def _nearest(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, 1)
    return f"use {near[0]}" if near else f"use one of {', '.join(known)}"


def from_environment() -> dict[str, Any] | None:
    """Arguments of `AxonnStrategy` in the variable ``AXONN_STRATEGY``; None where it is not set.

    Raises:
        ConfigError: it is not a JSON object of them.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f'{VARIABLE} = {text!r} is not a JSON object; write the strategy\'s arguments, such as {{"gx": 2}}'
        )
    for key in found:
        if key not in _ARGUMENTS:
            raise ConfigError(
                f"{VARIABLE}: {key} is not an argument of the strategy; {_nearest(key, list(_ARGUMENTS))}"
            )
    return found
