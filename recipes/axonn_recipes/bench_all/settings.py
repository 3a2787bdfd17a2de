"""Settings of a run, read from the command line and checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass, fields

from axonn_plugins.cluster.units import bits_per_second, nanoseconds, node_count
from axonn_plugins.config import ConfigError
from axonn_recipes.cluster_run import NUMBERS, ClusterRun, Place, Sizes
from axonn_recipes.options import Run, at_least_one, heads_fit, part

DEEPSPEED, MEGATRON, OURS = "DeepSpeed", "Megatron", "ours"


@dataclass(frozen=True)
class Way:
    """The placement of the model by one side.

    Attributes:
        host: whose engine trains.
        stages: of the pipeline; 1: none.
        experts: ranks that experts are dealt out over.
        microbatches: of a step.
        gx: of ours, ranks that split outputs of layers.
        gy: of ours, ranks that split inputs of layers.
        gz: of ours, ranks that share every weight.
    """

    host: str
    stages: int
    experts: int
    microbatches: int
    gx: int = 1
    gy: int = 1
    gz: int = 1

    def __str__(self) -> str:
        grid = f"x{self.gx} y{self.gy} z{self.gz}, " if self.host == OURS else ""
        stages = f"{self.stages} stages" if self.stages > 1 else "no pipeline"
        return f"{self.host}: {grid}{stages}, experts over {self.experts}, {self.microbatches} microbatches"


@dataclass(frozen=True, kw_only=True)
class Mixture(Sizes):
    """A GPT with experts in every block.

    Attributes:
        experts: experts in a layer.
        k: experts a token.
        width: inner features of an expert.
        sparsity: share of attention's and experts' weights that is pruned, on all sides; SAMO is on with ours. 0: a dense model.
        stage: of ZeRO, or 1 for Megatron's distributed optimizer; the same on all sides.
        steps: timed steps of a launch; their median counts.
        local: no emulated network: all ranks talk through loopback.
    """

    experts: int = 8
    k: int = 2
    width: int = 512
    sparsity: float = 0.9
    stage: int = 1
    steps: int = 3
    local: bool = False


@dataclass(frozen=True, kw_only=True)
class Options(Mixture, Place, Run):
    """A GPT with experts on the 4D grid, with experts dealt out, a pipeline, PCCL and pruning at once, beside DeepSpeed and Megatron.

    Attributes:
        deepspeed: stages, ranks of experts and microbatches, as in "1,8,1 2,4,4"; "": it is left out.
        megatron: the same of megatron.core.
        ours: stages, ranks of experts, microbatches, gx, gy and gz, as in "2,2,4,2,1,1".
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
    deepspeed: str = "1,8,1 2,4,2 2,4,4 2,2,2"
    megatron: str = "1,8,1 2,4,2 2,2,2"
    ours: str = "2,2,2,1,1,1 2,2,2,1,1,2 2,2,2,2,1,2"


@dataclass(frozen=True, kw_only=True)
class Settings(Mixture, ClusterRun):
    """Everything that decides what is measured."""

    ways: tuple[Way, ...]

    def readers(self, way: Way) -> int:
        """Ranks that read different tokens."""
        return self.ranks // (way.stages * way.gx * way.gy)


def resolve(options: Options) -> Settings:
    """The run that the command line asks for.

    Raises:
        ConfigError: the first mistake.
    """
    at_least_one(options, "ranks_per_node", *NUMBERS, "experts", "k", "width", "steps")
    nanoseconds(options.latency), bits_per_second(options.bandwidth)
    heads_fit(options.hidden, options.heads)
    if options.k > options.experts:
        raise ConfigError(f"--k {options.k} is more than --experts {options.experts}; lower it")
    if not 0 <= options.sparsity < 1:
        raise ConfigError(f"--sparsity {options.sparsity} is not a share from 0 to below 1; use one such as 0.9")
    if options.stage not in (0, 1):
        raise ConfigError(f"--stage {options.stage} is not 0 or 1, which all sides have beside a pipeline; use one")
    ways = [way for host, text in _texts(options) for way in _ways(host, text)]
    if not any(way.host == OURS for way in ways):
        raise ConfigError(
            "--ours names no side; write stages, ranks of experts, microbatches, gx, gy, gz as in 2,2,4,2,1,1"
        )
    chosen = {**part(Mixture, options), **part(Place, options), "nodes": node_count(options.nodes)}
    settings = Settings(**chosen, ways=tuple(ways))
    for way in ways:
        _check(settings, way)
    return settings


def _texts(options: Options) -> list[tuple[str, str]]:
    return [(DEEPSPEED, options.deepspeed), (MEGATRON, options.megatron), (OURS, options.ours)]


def _ways(host: str, text: str) -> list[Way]:
    count = len(fields(Way)) - 1 if host == OURS else 3
    ways = []
    for one in text.split():
        try:
            numbers = [int(number) for number in one.split(",")]
            if len(numbers) != count or min(numbers) < 1:
                raise ValueError
        except ValueError:
            form = "2,2,4,2,1,1" if host == OURS else "2,4,4"
            raise ConfigError(
                f"--{host.lower()} {one} is not {count} positive integers; write them as in {form}"
            ) from None
        ways.append(Way(host, *numbers))
    return ways


def _check(settings: Settings, way: Way) -> None:
    """Refuse a side that cannot be built.

    Raises:
        ConfigError: it cannot.
    """
    taken = way.stages * way.gx * way.gy * way.gz
    if settings.ranks % taken:
        raise ConfigError(f"{way}: {taken} does not divide the {settings.ranks} ranks; choose others")
    if settings.layers % way.stages:
        raise ConfigError(f"{way}: --layers {settings.layers} do not divide by its stages; use a multiple")
    for name, size, axis in (("heads", way.gx, "gx"), ("hidden", way.gy, "gy")):
        if getattr(settings, name) % size:
            raise ConfigError(
                f"{way}: {axis} = {size} does not divide --{name} {getattr(settings, name)}; choose a divisor"
            )
    readers = settings.readers(way)
    if readers % way.experts or settings.experts % way.experts:
        raise ConfigError(
            f"{way}: {way.experts} ranks divide not both the {readers} of a stage that may have them and --experts {settings.experts}; "
            "choose a divisor"
        )
    if settings.batch % (readers * way.microbatches):
        raise ConfigError(
            f"{way}: --batch {settings.batch} does not divide by {readers} readers and {way.microbatches} microbatches; use a multiple"
        )


def described(settings: Settings) -> str:
    """The run in words."""
    where = f"latency {settings.latency}, bandwidth {settings.bandwidth or 'unlimited'} a node"
    pruned = f"{settings.sparsity:.0%} of attention's and experts' weights pruned" if settings.sparsity else "dense"
    return "\n".join(
        [
            f"{settings.ranks} ranks: {settings.nodes} nodes of {settings.ranks_per_node}, "
            + ("ranks of this machine" if settings.local else where)
            + f"; peers on {settings.wire}, ours on pccl",
            f"GPT: {settings.layers} blocks, hidden {settings.hidden}, {settings.heads} heads, {settings.experts} experts of "
            f"{settings.width} in each, {settings.k} a token, none dropped; {pruned}; fp32, AdamW, ZeRO-{settings.stage} or "
            f"Megatron's {'distributed' if settings.stage else 'own'} optimizer; {settings.batch} x {settings.context} tokens a step",
            *map(str, settings.ways),
            f"{settings.rounds} rounds of {settings.steps} timed steps each, in turns",
        ]
    )
