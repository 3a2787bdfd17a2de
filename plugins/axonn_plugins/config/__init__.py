"""The ``"axonn"`` block of ds_config.json: strict, every key documented, wrong input refused in one sentence.

Each system has its own class and file, and a field of `Axonn`; keys that others register are in `systems`.
The JSON schema beside this file is written by ``axonn schema``.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, get_args

from pydantic import Field, PrivateAttr, ValidationError

from axonn_plugins import __version__
from axonn_plugins.config.base import Block as Block
from axonn_plugins.config.base import ConfigError as ConfigError
from axonn_plugins.config.base import Size as Size
from axonn_plugins.config.goldfish import Goldfish
from axonn_plugins.config.offload_optimizer import OffloadOptimizer
from axonn_plugins.config.pccl import Pccl
from axonn_plugins.config.pipeline import Pipeline
from axonn_plugins.config.samo import EarlyBird, Heads, Pruner, Random, Regrow, Samo, Schedule, Snip
from axonn_plugins.config.systems import REGISTERED
from axonn_plugins.config.ted import Ted
from axonn_plugins.config.tensor_parallel import Layer, SharedZ, TensorParallel


class Axonn(Block):
    """The whole block."""

    requires: str | None = Field(
        None, description='The lowest version of axonn-plugins that this block needs, such as "0.1".'
    )
    tensor_parallel: TensorParallel | None = Field(None, description="3D parallel matrix multiplication.")
    pccl: Pccl | None = Field(None, description="PCCL: collectives with few steps, on CPUs and on CUDA.")
    samo: Samo | None = Field(None, description="Training of a pruned network with compressed state.")
    ted: Ted | None = Field(
        None, description="Mixtures of experts by tensor, expert and data parallelism, and the tiled optimizer."
    )
    offload_optimizer: OffloadOptimizer | None = Field(
        None, description="Float32 weights and optimizer state in host memory."
    )
    pipeline: Pipeline | None = Field(None, description="The message-driven pipeline under a PipelineModule.")
    goldfish: Goldfish | None = Field(
        None, description="The goldfish loss, which leaves targets out against memorization."
    )
    overlap_param_gather: bool = Field(
        False,
        description="At ZeRO-1, gather updated weights while the next forward pass runs: whoever uses a weight first waits for it. Not where "
        "the optimizer's states are DeepSpeed's.",
    )
    _others: dict[str, Block] = PrivateAttr(default_factory=dict)

    def require_gather(self, stage: int, ours: bool = True) -> None:
        """Refuse ``overlap_param_gather`` where nothing that is ours gathers weights.

        Args:
            stage: of ZeRO.
            ours: whether the optimizer's states are the block's, and not DeepSpeed's.

        Raises:
            ConfigError: it is given, then.
        """
        sharing = stage or int(self.samo is not None and self.samo.shard)
        if self.overlap_param_gather and (sharing != 1 or not ours):
            whose = "the block's" if ours else "DeepSpeed's"
            raise ConfigError(
                "axonn.overlap_param_gather is about the weights that ZeRO-1 gathers behind a step where the optimizer's states are the block's "
                f"(tensor_parallel, ted, samo, offload_optimizer), and here they are {whose}, at stage {stage}; use that, or leave it out"
            )

    @property
    def others(self) -> dict[str, Block]:
        """Keys of systems that others have registered (`axonn_plugins.hosts.host`)."""
        return self._others


def parse(block: Any) -> Axonn:
    """The block, checked as far as it can be without knowing the run.

    Raises:
        ConfigError: the first mistake.
    """
    if isinstance(block, Mapping):
        _check_version(block)
    given = block if isinstance(block, Mapping) else {}
    others = {key: value for key, value in given.items() if key in REGISTERED and value is not None}
    try:
        found = Axonn.model_validate({k: v for k, v in given.items() if k not in REGISTERED} if others else block)
    except ValidationError as error:
        raise ConfigError(_sentence(error.errors(include_url=False)[0])) from None
    for key, value in others.items():
        try:
            found._others[key] = REGISTERED[key].block.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ConfigError(_sentence({**first, "loc": (key, *first["loc"])})) from None
    if found.samo is not None:
        found.samo.require_whole()
    if found.tensor_parallel is not None:
        found.tensor_parallel.require_compiled()
    return found


def _check_version(block: Mapping[str, Any]) -> None:
    wanted = block.get("requires")
    if not isinstance(wanted, str):
        return
    try:
        numbers = [int(part) for part in wanted.split(".")]
    except ValueError:
        raise ConfigError(f'axonn.requires = "{wanted}" is not a version; write it as "0.1" or "0.1.0"') from None
    have = [int(part) for part in __version__.split(".")]
    if numbers > have:
        raise ConfigError(
            f'axonn.requires = "{wanted}", but axonn-plugins {__version__} is installed, too old for this block\'s keys; '
            f'run pip install "axonn-plugins>={wanted}"'
        )


_CLASSES: dict[str, type[Block]] = {
    "tensor_parallel": TensorParallel,
    "plan": Layer,
    "gz": SharedZ,
    "pccl": Pccl,
    "samo": Samo,
    "ted": Ted,
    "pruner": Pruner,
    "early_bird": EarlyBird,
    "schedule": Schedule,
    "random": Random,
    "structure": Heads,
    "regrow": Regrow,
    "snip": Snip,
    "offload_optimizer": OffloadOptimizer,
    "pipeline": Pipeline,
    "goldfish": Goldfish,
}


def _block_at(location: tuple[str | int, ...]) -> tuple[type[Block], str]:
    """The class of the block at a location, and its documented path."""
    block: type[Block] = Axonn
    for part in location:
        registered = REGISTERED.get(str(part))
        found = registered.block if registered is not None else _CLASSES.get(str(part), block)
        field = block.model_fields.get(str(part))
        # Keys of two blocks may have one name: a pipeline's schedule is a word.
        if registered is not None or field is None or found.__name__ in str(field.annotation):
            block = found
    return block, ".".join(["axonn", *(str(part) for part in location)])


def _sentence(error: Any) -> str:
    """One of pydantic's errors as one sentence."""
    location, kind, value = tuple(error["loc"]), error["type"], error["input"]
    block, path = _block_at(location)
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    if kind == "extra_forbidden":
        parent, _ = _block_at(location[:-1])
        known = sorted([*parent.model_fields, *(REGISTERED if parent is Axonn else ())])
        return f"{path} is not a key; use {_nearest(str(location[-1]), known)}"
    if kind == "missing":
        return f"{path} is missing; add it to {path.rsplit('.', 1)[0]}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        what = 'an object of name patterns, or "auto"' if location and location[-1] == "plan" else "an object"
        return f"{path} = {shown} is not {what}; write it in braces"
    if kind == "literal_error":
        allowed = [str(choice) for choice in get_args(block.model_fields[str(location[-1])].annotation)]
        return f"{path} = {shown} is not known; use {_nearest(str(value), allowed)}"
    allowed_text = {
        "bool_type": "true or false",
        "string_type": "a string",
        "string_too_short": "a string that is not empty",
        "list_type": "a list of strings",
    }.get(kind) or (_number(block, str(location[-1])) if kind in _OF_NUMBERS else error["msg"])
    return f"{path} = {shown} is not {allowed_text}; correct its value"


_OF_NUMBERS = (
    *("int_type", "int_from_float", "float_type", "finite_number"),
    *("greater_than", "greater_than_equal", "less_than", "less_than_equal"),
)
_LIMITS = {
    "minimum": "of at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def _number(block: type[Block], key: str) -> str:
    """The numbers that a key takes."""
    found = block.model_json_schema()["properties"].get(key, {"type": "integer", "minimum": 1})
    found = next((one for one in found.get("anyOf", ()) if one.get("type") in ("integer", "number")), found)
    limits = [f"{words} {found[name]:.10g}" for name, words in _LIMITS.items() if name in found]
    what = "an integer" if found.get("type") == "integer" else "a number"
    return f"{what} {' and '.join(limits)}".rstrip()


def _nearest(word: str, known: list[str]) -> str:
    """The one that was meant, where one is like it, and all of them."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f'"{near[0]}", or another of {", ".join(known)}' if near else f"one of {', '.join(known)}"


def schema() -> str:
    """The block's JSON schema as text."""
    return json.dumps(Axonn.model_json_schema(), indent=2) + "\n"


def shipped_schema() -> str:
    """The schema that is installed with the package."""
    return files("axonn_plugins").joinpath("axonn.schema.json").read_text()
