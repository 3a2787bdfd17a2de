"""Settings of a run, read from the command line and checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from axonn_plugins.cluster.units import bits_per_second, nanoseconds, node_count
from axonn_plugins.config import ConfigError
from axonn_recipes.cluster_run import NUMBERS, ClusterRun, Place, Sizes
from axonn_recipes.options import Run, at_least_one, heads_fit

PEERS = {"hf": "AutoEP and AutoTP", "megatron": "Megatron"}
"""Who else trains a model."""
_USUAL = {"hf": "2,4 2,8 1,8 1,2", "megatron": "1,4 1,8"}
_OURS = {"hf": "2,4,1 1,8,1 1,8,8 1,2,1", "megatron": "2,4,1 1,4,1 1,8,1 1,8,8"}


@dataclass(frozen=True, kw_only=True)
class Way:
    """The placement of a model by one side.

    Attributes:
        ours: whether it is ours.
        tensor: ranks that split a layer: AutoTP's, Megatron's, or gx.
        experts: ranks that experts are dealt out over.
        z: of ours, ranks that share every weight.
    """

    ours: bool
    tensor: int
    experts: int
    z: int = 1


@dataclass(frozen=True, kw_only=True)
class Mixture(Sizes):
    """A transformer with experts in every block.

    Attributes:
        model: hf: Qwen3-MoE of transformers, under DeepSpeed. megatron: megatron.core's GPT with experts.
        experts: experts in a layer.
        k: experts a token.
        width: inner features of an expert.
        stage: of ZeRO, or 1 for Megatron's distributed optimizer, with its sums beside backward and its gathers beside forward; the same on all sides.
        steps: timed steps of a round; their median counts.
        local: no emulated network: all ranks talk through loopback.
    """

    model: Literal["hf", "megatron"] = "hf"
    experts: int = 8
    k: int = 2
    width: int = 128
    stage: Literal[0, 1] = 1
    steps: int = 3
    local: bool = False


@dataclass(frozen=True, kw_only=True)
class Options(Mixture, Place, Run):
    """A mixture of experts of today under our block or flags, beside DeepSpeed's AutoEP and AutoTP, or Megatron's own folding.

    Attributes:
        peers: ranks that split layers, and ranks of experts, as in "2,4 1,8"; of these AutoEP and AutoTP, or Megatron, are measured;
            by itself 2,4 2,8 1,8 1,2, of a Megatron 1,4 1,8.
        ours: gx, ranks of experts, and gz, as in "2,4,1 1,8,8"; by itself 2,4,1 1,8,1 1,8,8, and of a HF model 1,2,1, of a Megatron 1,4,1.
    """

    nodes: int = 4
    ranks_per_node: int = 2
    latency: str = "100us"
    bandwidth: str | None = "150Mbit"
    layers: int = 2
    hidden: int = 128
    context: int = 128
    batch: int = 32
    rounds: int = 5
    peers: str | None = None
    ours: str | None = None


@dataclass(frozen=True, kw_only=True)
class Settings(Mixture, ClusterRun):
    """Everything that decides what is measured."""

    ways: tuple[Way, ...]

    def name(self, way: Way) -> str:
        """A side in short."""
        if way.ours:
            return f"ours, x{way.tensor} z{way.z}, experts over {way.experts}"
        return f"{PEERS[self.model]}, {way.tensor}, experts over {way.experts}"

    def readers(self, way: Way) -> int:
        """Ranks that read different tokens."""
        return self.ranks // way.tensor


def resolve(options: Options) -> Settings:
    """The run that the command line asks for.

    Raises:
        ConfigError: the first mistake.
    """
    numbers = ("ranks_per_node", *NUMBERS, "experts", "k", "width", "steps")
    at_least_one(options, *numbers)
    nanoseconds(options.latency), bits_per_second(options.bandwidth)
    heads_fit(options.hidden, options.heads)
    if options.k > options.experts:
        raise ConfigError(f"--k {options.k} is more than --experts {options.experts}; lower it")
    others = ("model", "stage", "local", "latency", "bandwidth", "backend")
    chosen = {name: getattr(options, name) for name in (*numbers, *others)}
    settings = Settings(**chosen, nodes=node_count(options.nodes), ways=())
    peers = _USUAL[options.model] if options.peers is None else options.peers
    ways = [_way("--peers", text, 2) for text in peers.split()]
    ours = _OURS[options.model] if options.ours is None else options.ours
    ways += [_way("--ours", text, 3) for text in ours.split()]
    if not any(way.ours for way in ways):
        raise ConfigError("--ours names no side; write gx, ranks of experts, gz as in 2,4,1")
    for way in ways:
        _check(settings, way)
    return replace(settings, ways=tuple(ways))


def _way(option: str, text: str, count: int) -> Way:
    try:
        tensor, experts, *z = (int(size) for size in text.split(","))
        if len(z) != count - 2 or min(tensor, experts, *z) < 1:
            raise ValueError
    except ValueError:
        form = "2,4" if count == 2 else "2,4,1"
        raise ConfigError(f"{option} {text} is not {count} positive integers; write them as in {form}") from None
    return Way(ours=count == 3, tensor=tensor, experts=experts, z=z[0] if z else 1)


def _check(settings: Settings, way: Way) -> None:
    """Refuse a side that cannot be built.

    Raises:
        ConfigError: it cannot.
    """
    called, ranks = settings.name(way), settings.ranks
    if ranks % (way.tensor * way.z) or settings.heads % way.tensor:
        raise ConfigError(
            f"{called}: {way.tensor * way.z} does not divide the {ranks} ranks, or {way.tensor} not --heads {settings.heads}; choose others"
        )
    if settings.model == "megatron" and not way.ours and way.tensor > 1:
        raise ConfigError(
            f"{called}: Megatron trains experts beside tensor ranks with sequence parallelism alone, whose norms are Transformer Engine's or "
            "apex's and need a GPU; write 1 and ranks of experts, as in 1,8"
        )
    over = settings.readers(way) if way.ours else ranks
    if over % way.experts or settings.experts % way.experts:
        raise ConfigError(
            f"{called}: experts over {way.experts} divide not both the {over} ranks that may have them and --experts {settings.experts}; "
            "choose a divisor"
        )
    if settings.batch % settings.readers(way):
        raise ConfigError(
            f"{called}: --batch {settings.batch} does not divide by the {settings.readers(way)} ranks that read it; use a multiple"
        )


def described(settings: Settings) -> str:
    """The run in words."""
    where = f"latency {settings.latency}, bandwidth {settings.bandwidth or 'unlimited'} a node"
    kind = {"hf": "Qwen3-MoE of transformers under DeepSpeed", "megatron": "megatron.core's GPT"}[settings.model]
    stage = "ZeRO-1" if settings.model == "hf" else "Megatron's distributed optimizer, overlapped"
    return "\n".join(
        [
            f"{settings.ranks} ranks: {settings.nodes} nodes of {settings.ranks_per_node}, {settings.wire}, "
            + ("ranks of this machine" if settings.local else where),
            f"{kind}: {settings.layers} blocks, hidden {settings.hidden}, {settings.heads} heads, {settings.experts} experts of "
            f"{settings.width} in each, {settings.k} a token, none dropped; fp32, AdamW{f', {stage}' if settings.stage else ''}; "
            f"{settings.batch} x {settings.context} tokens a step",
            *(settings.name(way) for way in settings.ways),
            f"{settings.rounds} rounds of {settings.steps} timed steps each, in turns",
        ]
    )
