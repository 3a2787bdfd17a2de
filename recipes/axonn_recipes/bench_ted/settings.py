"""Settings of a run, read from the command line and checked before anything is started."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from axonn_plugins.cluster.units import bits_per_second, nanoseconds, node_count
from axonn_plugins.config import ConfigError
from axonn_recipes.bench.wire import Wire
from axonn_recipes.cluster_run import NUMBERS, ClusterRun, Sizes
from axonn_recipes.options import Run, at_least_one, heads_fit
from ted_moe import Topology

MIN_CAPACITY = 4


@dataclass(frozen=True, kw_only=True)
class Layers(Sizes):
    """A GPT with experts, and how it is split.

    Attributes:
        tensor: ranks that split a layer; the others split the batch and the experts.
        every: each so many-th block has experts.
        experts: experts in a layer.
        k: experts a token.
        local: no emulated network: all ranks talk through loopback.
    """

    tensor: int = 2
    every: int = 2
    experts: int = 8
    k: int = 1
    local: bool = False


@dataclass(frozen=True, kw_only=True)
class Options(Layers, Wire, Run):
    """TED, its communication optimizations one after another, and stock DeepSpeed-MoE, side by side in one run.

    Attributes:
        nodes: emulated nodes; several, such as 1,2,4, for scaling.
        ranks_per_node: ranks on each.
        latency: between nodes, one way.
        bandwidth: of a node in each direction.
        scaling: with several --nodes, strong: all have the same batch; weak: --batch is that of the most nodes, and others
            have their share of it.
    """

    nodes: str = "4"
    ranks_per_node: int = 2
    latency: str = "100us"
    bandwidth: str = "150Mbit"
    scaling: Literal["strong", "weak"] = "strong"
    hidden: int = 128
    context: int = 128
    batch: int = 64
    rounds: int = 7


@dataclass(frozen=True, kw_only=True)
class Settings(Layers, ClusterRun):
    """Everything that decides what is measured; sizes are counts."""

    bandwidth: str

    @property
    def data(self) -> int:
        """Ranks that read different tokens, over which the experts are dealt out."""
        return self.ranks // self.tensor

    @property
    def topology(self) -> Topology:
        """Who is with whom."""
        return Topology(self.ranks, self.tensor, self.data)

    @property
    def expert_layers(self) -> int:
        """Blocks with experts."""
        return self.layers // self.every

    @property
    def capacity(self) -> int:
        """An expert's slots for the tokens of one rank; the capacity factor is 1."""
        return max(MIN_CAPACITY, math.ceil(self.tokens // self.data * self.k / self.experts))


def resolve(options: Options) -> list[Settings]:
    """Make the settings that the command line asks for: a run for each number of nodes.

    Raises:
        ConfigError: the first mistake.
    """
    numbers = ("ranks_per_node", *NUMBERS, "tensor", "every", "experts", "k")
    at_least_one(options, *numbers)
    nanoseconds(options.latency), bits_per_second(options.bandwidth)
    nodes = _nodes(options.nodes)
    chosen = {name: getattr(options, name) for name in (*numbers, "local", "latency", "bandwidth", "backend")}
    runs = [Settings(nodes=number, **chosen) for number in nodes]
    if options.scaling == "weak":
        for number in nodes:
            if options.batch * number % max(nodes):
                raise ConfigError(
                    f"--batch {options.batch} has no share for {number} of {max(nodes)} nodes; use a multiple of {max(nodes)}"
                )
        runs = [replace(run, batch=run.batch * run.nodes // max(nodes)) for run in runs]
    for run in runs:
        _check(run)
    return runs


def _nodes(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--nodes {text} is not a number, nor several separated by commas; write 4, or 1,2,4"
        ) from None
    return [node_count(number) for number in numbers]


def _check(settings: Settings) -> None:
    """Refuse sizes with which a side cannot be built.

    Raises:
        ConfigError: one cannot.
    """
    ranks, tensor, data = settings.ranks, settings.tensor, settings.data
    if ranks % tensor:
        raise ConfigError(f"--tensor {tensor} does not divide the {ranks} ranks; choose a divisor")
    heads_fit(settings.hidden, settings.heads)
    if settings.heads % tensor:
        raise ConfigError(f"--heads {settings.heads} do not divide by --tensor {tensor}; use a multiple")
    if settings.layers < settings.every:
        raise ConfigError(f"--every {settings.every} leaves no block of --layers {settings.layers} experts; lower it")
    for name in ("batch", "experts"):
        if getattr(settings, name) % data:
            raise ConfigError(
                f"--{name} {getattr(settings, name)} does not divide by the {data} ranks that split it; use a multiple"
            )
    if settings.k > settings.experts:
        raise ConfigError(f"--k {settings.k} is more than --experts {settings.experts}; lower it")
    if settings.capacity % tensor:
        raise ConfigError(
            f"--experts {settings.experts} have {settings.capacity} slots each for a rank's tokens, which do not divide by "
            f"--tensor {tensor} as stock DeepSpeed needs; change --batch, --context or --experts"
        )


def described(runs: list[Settings]) -> str:
    """The run in words."""
    network = "ranks of this machine" if runs[0].local else f"latency {runs[0].latency}, bandwidth {runs[0].bandwidth}"
    first = runs[0]
    lines = [
        f"{run.ranks} ranks: {run.nodes} x {run.ranks_per_node}, {run.wire}, {network}; tensor {run.tensor}, data and experts {run.data}; "
        f"{run.batch} x {run.context} tokens a step"
        for run in runs
    ]
    return "\n".join(
        [
            *lines,
            f"GPT: {first.layers} blocks, hidden {first.hidden}, {first.heads} heads, fp32, AdamW; {first.experts} experts in "
            f"{first.expert_layers} of the blocks, top-{first.k}; every block checkpointed (torch's, reentrant as DeepSpeed's)",
            "deepspeed: stock deepspeed.moe.layer.MoE with tensor parallelism through groups.mpu, its gather (moe/mappings.py) given "
            "a flattened input, without which it crashes on gloo",
            "the others are ted_moe.MoE: all off, then with duplicate token dropping, communication-aware checkpointing, fused sums",
            f"{first.rounds} timed steps each, in turns, and as many with blocking collectives for the parts",
        ]
    )
