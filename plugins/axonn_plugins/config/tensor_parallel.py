"""The ``"tensor_parallel"`` key of the ``"axonn"`` block."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, WrapValidator, field_validator, model_validator
from pydantic_core import PydanticCustomError

from axonn_plugins.config.base import Block, ConfigError, Size

LayerKind = Literal[
    "normal", "transposed", "head", "self_contained", "embedding", "norm", "group_norm", "loss", "replicated"
]


class Layer(Block):
    """The kind of the layers that match a pattern, and its settings."""

    kind: LayerKind = Field(
        description="normal: linear or convolution that contracts over y and splits its output over x. transposed: the other way round. "
        "head: like normal, output padded to a multiple of gx. self_contained: linear with whole features in and out. "
        "embedding: vocabulary over x, features over y, which all layers after it then find split. "
        "norm: LayerNorm or RMSNorm over split features. group_norm: GroupNorm between a normal and a "
        "transposed convolution. loss: CrossEntropyLoss over a split vocabulary. replicated: left alone."
    )
    parts: Size = Field(1, description="The output is this many equal matrices side by side, 3 for a fused q, k, v.")
    heads: Size | None = Field(None, description="Attention heads in each part; they are never cut.")
    counts: Annotated[list[str], Field(strict=True)] = Field(
        default_factory=list,
        description="Integer attributes (name or config.name) of the module that holds the layer, such as num_heads, which its "
        "forward reads and which must be divided by the number of shares; x.shape[-1] for the width of the forward's argument x, where code takes "
        "that of what the layer gives from it.",
    )
    reads: str | None = Field(
        None,
        description="A word for the tensor that a normal layer reads: layers of one module with the same word gather it once, and reduce "
        "its gradient once. By default the normal layers of one module before a transposed one read the same tensor.",
    )
    whole_tokens: bool = Field(
        False,
        description="For an embedding: the stream that it starts keeps all its tokens on every rank of x, also in the scattered layout, for "
        "code that counts the tokens of an activation.",
    )


def _layers(value: Any, either: Any) -> Any:
    # Not by `either`, the union, whose errors would speak of both kinds.
    if value == "auto":
        return value
    if isinstance(value, Mapping):
        value = {pattern: {"kind": layer} if isinstance(layer, str) else layer for pattern, layer in value.items()}
    return _LAYERS.validate_python(value)


_LAYERS = TypeAdapter(dict[str, Layer], config=ConfigDict(strict=True))
Plan = Annotated[
    Literal["auto"] | dict[str, Layer],
    WrapValidator(_layers, json_schema_input_type=Literal["auto", "planner"] | dict[str, LayerKind | Layer]),
]


class SharedZ(Block):
    """Ranks along z of which some share the tokens of each sequence."""

    batch: Size = Field(1, description="Ranks along z that read different samples.")
    sequence: Size = Field(description="Neighbours along z that share the tokens of every sequence.")


def _z_size(value: Any, either: Any) -> Any:
    return SharedZ.model_validate(value) if isinstance(value, Mapping) else _grid_size(value, either)


def _grid_size(value: Any, either: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise PydanticCustomError("grid_size", 'an integer of at least 1, or "auto"')


GridSize = Annotated[
    int | Literal["auto"],
    WrapValidator(_grid_size, json_schema_input_type=Size | Literal["auto"]),
]


ZSize = Annotated[
    int | Literal["auto"] | SharedZ,
    WrapValidator(_z_size, json_schema_input_type=Size | Literal["auto"] | SharedZ),
]


class TensorParallel(Block):
    """AxoNN's 3D parallel matrix multiplication (dissertation chapter 5)."""

    impl: Literal["axonn3d"] = Field("axonn3d", description="The implementation.")
    gx: GridSize = Field(
        1,
        description="Ranks along x: splits the output features of normal layers, and attention heads. "
        '"auto": the planner chooses when the engine starts; the same for gy and gz.',
    )
    gy: GridSize = Field(
        1, description="Ranks along y: splits the input features of normal layers, and the residual stream."
    )
    gz: ZSize = Field(
        1,
        description="Ranks along z: splits every weight and the batch; alone it is FSDP (ZeRO-3). data = world/(gx*gy*gz). "
        '{"batch": 2, "sequence": 4}: 8 ranks, of which 4 at a time share the tokens of their samples.',
    )
    attention: Literal["auto", "gather", "ring", "heads"] = Field(
        "auto",
        description="Where ranks of z share sequences, what travels: gather: keys and values that queries see, at once. ring: keys and values, from "
        "rank to rank while computing. heads: queries, keys and values of some heads to each rank, and outputs back. auto: what sends least.",
    )
    machine: str | None = Field(
        None,
        description='For sizes that are "auto": a machine of axonn plan by name, or the path of its file. By default what axonn bench '
        "network last measured on this machine, else one like this accelerator.",
    )
    tokens_per_sample: Size | None = Field(
        None,
        description='For sizes that are "auto": rows of activations that one sample has, such as its tokens. By default what the model\'s '
        "config says, as max_position_embeddings.",
    )
    plan: Plan = Field(
        default_factory=dict,
        description='Layers by name pattern (* matches anything, the first match wins), or "auto" to find the pairs and print them; "planner" is '
        '"auto" here and for the sizes that are not given. '
        "Linear layers that no pattern names become self_contained.",
    )
    layout: Literal["scattered", "replicated"] = Field(
        "scattered",
        description="Layout of activations. replicated: an all-reduced output stands on every rank of the contracted axis. scattered: it is "
        "reduce-scattered and gathered where it is needed; same bytes on the wire, no activation stored and no attention computed twice.",
    )
    overlap_all_reduce: bool = Field(
        True, description="OAR: the input gradient is reduced while the weight gradient is computed."
    )
    overlap_reduce_scatter: bool = Field(
        True, description="ORS: weight gradients' reduce-scatters over z are waited for once, when backward ends."
    )
    overlap_all_gather: bool = Field(
        True, description="OAG: the next layer's weight is gathered over z while this layer computes."
    )
    reshard_after_forward: bool | float = Field(
        False,
        description="Let gathered weights go after the forward pass and gather them again in backward: less memory, one more gather a layer. "
        "A share between 0 and 1 lets those of the first layers go, and keeps the last layers', which backward needs first.",
    )
    regather_inputs: bool = Field(
        False,
        description="Keep of a scattered input only this rank's share and gather it again in backward, while the input gradient is "
        "computed: activations kept are smaller by gx or gy, one more all-gather a layer.",
    )
    cache_gathers: int | str = Field(
        0,
        description="Under activation checkpointing, the layers that keep their gathered weight from forward to recomputation: a number, "
        '"all", or a size such as "2GiB" for as many as it holds.',
    )
    sync_batch_norm: bool = Field(
        False,
        description="BatchNorm takes the statistics of the samples of all ranks of z and data, as one rank with the whole batch would. "
        "By default those of each rank's own samples, as under DDP: then results depend on gz and the number of ranks.",
    )
    tune_matmuls: bool = Field(
        False,
        description="Time every distinct matmul of the first step as NN, NT and TN, keep the fastest for the run, print the gains and cache "
        "them on disk by device and library version.",
    )
    compile: bool = Field(
        False,
        description="torch.compile, which otherwise leaves split layers as they are, traces them and their collectives. Only with "
        '"layout": "replicated"; what overlaps is then the compiler\'s choice. Not with gz.sequence, reshard_after_forward, regather_inputs, '
        "cache_gathers, sync_batch_norm, tune_matmuls, ted or pipeline.",
    )
    trace_steps: list[int] | None = Field(
        None,
        description="Two steps, first and last, counted from 1: rank 0 records them by torch.profiler, collectives under their axes' names, "
        "and writes trace-rank0.json for chrome://tracing and ui.perfetto.dev. Not with pipeline.",
    )
    trace_folder: str = Field(".", description="The folder for trace-rank0.json.")
    broadcast_inputs: bool = Field(
        False,
        description="Give ranks that differ only in x and y the batch of the first of them, by broadcasting the arguments of the model's "
        "forward. By default they are compared, and a batch that differs is refused.",
    )
    check_every: Size = Field(
        10,
        description="Steps between comparisons of all that replicas should have the same: outputs, their gradients, and parameters. "
        "Arguments and random state are compared in every call of the model.",
    )
    verify_plan: bool = Field(
        True,
        description="Where the plan names layers, run the first batch once more as the serial model and refuse to train if a layer's output "
        "differs; "
        "the same where ranks of z share sequences. Turn off for a model whose forward gives other results when it is repeated.",
    )

    def require_compiled(self) -> None:
        """Refuse what does not go with `compile`.

        Raises:
            ConfigError: the first such key.
        """
        if not self.compile:
            return
        if self.sequence > 1:
            raise ConfigError(
                f"axonn.tensor_parallel.gz.sequence = {self.sequence} does not go with axonn.tensor_parallel.compile, as what looks across "
                "shared sequences is not traced; use 1, or leave compile out"
            )
        needed = {"layout": "replicated", "reshard_after_forward": False, "regather_inputs": False, "cache_gathers": 0}
        for key, value in {**needed, "sync_batch_norm": False, "tune_matmuls": False}.items():
            held = getattr(self, key)
            if held != value:
                raise ConfigError(
                    f"axonn.tensor_parallel.{key} = {json.dumps(held)} does not go with axonn.tensor_parallel.compile, which traces the plain "
                    f"collectives alone; use {json.dumps(value)}, or leave compile out"
                )

    @model_validator(mode="before")
    @classmethod
    def _planner(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("plan") == "planner":
            return {"gx": "auto", "gy": "auto", "gz": "auto", **value, "plan": "auto"}
        return value

    @property
    def given(self) -> dict[str, int]:
        """Sizes that are not "auto", by gx, gy and gz."""
        z = self.gz.batch * self.gz.sequence if isinstance(self.gz, SharedZ) else self.gz
        sizes = {"gx": self.gx, "gy": self.gy, "gz": z}
        return {axis: size for axis, size in sizes.items() if isinstance(size, int)}

    @property
    def sequence(self) -> int:
        """Ranks of z that share the tokens of each sequence."""
        return self.gz.sequence if isinstance(self.gz, SharedZ) else 1

    @model_validator(mode="after")
    def _shared(self) -> TensorParallel:
        if self.sequence > 1 and len(self.given) < 3:
            raise PydanticCustomError(
                "shared",
                'a grid of numbers: gz.sequence does not go with gx or gy = "auto", which "plan": "planner" also makes of those that are left out',
            )
        return self

    @field_validator("trace_steps", mode="before")
    @classmethod
    def _steps(cls, value: Any) -> Any:
        whole = isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in value)
        if value is None or (whole and len(value) == 2 and 1 <= value[0] <= value[1]):
            return value
        raise PydanticCustomError("steps", "two steps of at least 1, first and last, such as [10, 12]")

    @field_validator("cache_gathers", mode="before")
    @classmethod
    def _gathers(cls, value: Any) -> Any:
        number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if number or (isinstance(value, str) and re.fullmatch(r"all|\d+(\.\d+)? *([KMG]i)?B", value)):
            return value
        raise PydanticCustomError("gathers", 'a number of layers, "all", or a size such as "2GiB"')

    @field_validator("reshard_after_forward", mode="before")
    @classmethod
    def _share(cls, value: Any) -> Any:
        if isinstance(value, (bool, int, float)) and 0 <= value <= 1:
            return value
        raise PydanticCustomError("share", "true, false or a share between 0 and 1")
