"""The ``"axonn"`` block of ds_config.json: strict, every key documented, wrong input refused in one sentence.

Each system has its own class and sub-block; a new one is a class here or in its package, and a field of `Axonn`.
The JSON schema beside this file is written by ``axonn schema``.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from axonn_plugins import __version__
from axonn_plugins.config.base import Block as Block
from axonn_plugins.config.base import ConfigError as ConfigError
from axonn_plugins.config.base import Size as Size
from axonn_plugins.config.offload_optimizer import OffloadOptimizer
from axonn_plugins.config.pipeline import Pipeline
from axonn_plugins.config.samo import EarlyBird, Pruner, Samo
from axonn_plugins.config.systems import REGISTERED
from axonn_plugins.pccl.options import Options

LayerKind = Literal[
    "normal", "transposed", "head", "self_contained", "embedding", "norm", "group_norm", "loss", "replicated"
]


class Layer(Block):
    """What the layers that match a pattern become."""

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
        "forward reads and which must be divided by the number of shares.",
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


def _ranks_per_node(value: Any, either: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise PydanticCustomError("ranks_per_node", 'an integer of at least 1, or "auto"')


def _grid_size(value: Any, either: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise PydanticCustomError("grid_size", 'an integer of at least 1, or "auto"')


GridSize = Annotated[
    int | Literal["auto"],
    WrapValidator(_grid_size, json_schema_input_type=Size | Literal["auto"]),
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
    gz: GridSize = Field(
        1,
        description="Ranks along z: splits every weight and the batch; alone it is FSDP (ZeRO-3). data = world/(gx*gy*gz).",
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
    reshard_after_forward: bool = Field(
        False,
        description="Let gathered weights go after the forward pass and gather them again in backward: less memory, one more gather a layer.",
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
    trace_steps: list[int] | None = Field(
        None,
        description="Two steps, first and last, counted from 1: rank 0 records them by torch.profiler, collectives under their axes' names, "
        "and writes trace-rank0.json for chrome://tracing and ui.perfetto.dev.",
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
        "differs. Turn off for a model whose forward gives other results when it is repeated.",
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
        sizes = {"gx": self.gx, "gy": self.gy, "gz": self.gz}
        return {axis: size for axis, size in sizes.items() if isinstance(size, int)}

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


class Pccl(Block):
    """DeepSpeed's collectives by PCCL (dissertation chapter 6), on CPU tensors."""

    algorithm: Literal["auto", "ring", "recursive", "hierarchical", "native"] = Field(
        "auto",
        description="auto: by collective, size and nodes. ring: p-1 steps. recursive: doubling and halving, and Bruck's algorithm where the "
        "ranks are no power of two. hierarchical: few steps between nodes for small sizes, a ring for large ones, then within each node. "
        "native: gloo.",
    )
    ranks_per_node: Annotated[int | Literal["auto"], WrapValidator(_ranks_per_node)] = Field(
        "auto", description="auto: ranks whose node has the same name are on one node. n: each n consecutive ranks are."
    )
    interfaces: list[str] | None = Field(
        None,
        description="Network interfaces by name, of which process i of a node uses number i modulo their count. By default those of "
        "GLOO_SOCKET_IFNAME, else the one that leads to MASTER_ADDR.",
    )
    tuning_file: str | None = Field(
        None, description="Where measurements of this cluster are kept; by default in the user's cache folder."
    )
    tune: bool | None = Field(
        None,
        description="Whether auto measures, in some 10 seconds, at the first start on a cluster of which nothing was measured; "
        "by default AXONN_PCCL_TUNE says so, else true.",
    )
    silence: Annotated[float, Field(ge=1, le=86400)] = Field(
        30.0, description="Seconds after which a node that does not answer is given up."
    )
    read_memory: bool = Field(
        False,
        description="Whether ranks of a node may read each other's memory even where Yama (kernel.yama.ptrace_scope = 1) forbids it: it "
        "is then opened to the nearest process that started them all, and to what that started.",
    )

    @field_validator("interfaces", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        if value is None or (isinstance(value, list) and value and all(isinstance(name, str) for name in value)):
            return value
        raise PydanticCustomError("interfaces", 'a list of network interfaces such as ["eth0"]')

    def options(self) -> Options:
        """The same for torch."""
        names = None if self.interfaces is None else tuple(self.interfaces)
        given = (self.algorithm, self.ranks_per_node, names, self.tuning_file, self.tune)
        return Options(*given, silence=self.silence, read_memory=self.read_memory)


class Ted(Block):
    """TED: mixtures of experts by tensor, expert and data parallelism (dissertation chapter 7).

    Every deepspeed.moe.layer.MoE of the model becomes TED's layer; its ep_size is the expert parallelism.
    """

    tensor: Size = Field(
        1,
        description="Ranks that split a layer, dense or expert, as Megatron does; neighbours, which read the same data.",
    )
    expert_tensor_parallel: bool | None = Field(
        None,
        description="Whether experts, too, are split over the tensor ranks. false: these hold different experts, whole ones, so that ep_size "
        "counts them, too. By default true; in a script with an mpu what its layers' enable_expert_tensor_parallelism says, which has split "
        "them itself then.",
    )
    duplicate_token_dropping: bool = Field(
        True, description="Each tensor rank sends its share of the tokens through the all-to-alls, not all of them."
    )
    fused: bool = Field(
        True,
        description="Where a drop of duplicates follows an all-reduce, the two are one reduce-scatter, which moves half the bytes.",
    )
    dropless: bool = Field(
        False,
        description="No token is passed by and no slot padded, whatever the layers' capacities: uneven all-to-alls.",
    )
    communication_aware_checkpointing: bool = Field(
        True,
        description="In blocks under torch's or DeepSpeed's activation checkpointing, the recomputation is given what the first forward "
        "communicated.",
    )
    stash: Literal["device", "cpu"] = Field(
        "device", description="Where that is kept until then: on the device, or in the host's (pinned) memory."
    )
    tile_size: Size | None = Field(
        1_800_000,
        description="Under ZeRO-1 and 2, elements whose float32 gradients exist at a time in the optimizer's step, which needs 4 bytes of "
        "temporary memory for each. null: all at once, as DeepSpeed does.",
    )


class Axonn(Block):
    """The whole block."""

    requires: str | None = Field(
        None, description='The lowest version of axonn-plugins that this block needs, such as "0.1".'
    )
    tensor_parallel: TensorParallel | None = Field(None, description="3D parallel matrix multiplication.")
    pccl: Pccl | None = Field(None, description="Collectives with few steps for DeepSpeed on the CPU.")
    samo: Samo | None = Field(None, description="Training of a pruned network with compressed state.")
    ted: Ted | None = Field(
        None, description="Mixtures of experts by tensor, expert and data parallelism, and the tiled optimizer."
    )
    offload_optimizer: OffloadOptimizer | None = Field(
        None, description="Float32 weights and optimizer state in host memory."
    )
    pipeline: Pipeline | None = Field(None, description="The message-driven pipeline under a PipelineModule.")
    _others: dict[str, Block] = PrivateAttr(default_factory=dict)

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
    "pccl": Pccl,
    "samo": Samo,
    "ted": Ted,
    "pruner": Pruner,
    "early_bird": EarlyBird,
    "offload_optimizer": OffloadOptimizer,
    "pipeline": Pipeline,
}


def _block_at(location: tuple[str | int, ...]) -> tuple[type[Block], str]:
    """The class of the block at a location, and its documented path."""
    block: type[Block] = Axonn
    for part in location:
        registered = REGISTERED.get(str(part))
        block = registered.block if registered is not None else _CLASSES.get(str(part), block)
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
        near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.0)[0]
        return f'{path} is not a key; use "{near}", or another of {", ".join(known)}'
    if kind == "missing":
        return f"{path} is missing; add it to {path.rsplit('.', 1)[0]}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        what = 'an object of name patterns, or "auto"' if location and location[-1] == "plan" else "an object"
        return f"{path} = {shown} is not {what}; write it in braces"
    if kind == "literal_error":
        allowed = [str(choice) for choice in get_args(block.model_fields[str(location[-1])].annotation)]
        near = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.0)[0]
        return f'{path} = {shown} is not known; use "{near}", or another of {", ".join(allowed)}'
    allowed_text = {
        "int_type": "an integer of at least 1",
        "greater_than_equal": "an integer of at least 1",
        "bool_type": "true or false",
        "string_type": "a string",
    }.get(kind, error["msg"])
    return f"{path} = {shown} is not {allowed_text}; correct its value"


def schema() -> str:
    """The block's JSON schema as text."""
    return json.dumps(Axonn.model_json_schema(), indent=2) + "\n"


def shipped_schema() -> str:
    """The schema that is installed with the package."""
    return files("axonn_plugins").joinpath("axonn.schema.json").read_text()
