"""Settings of a run, read from the command line and checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from axonn_plugins.cluster.units import bits_per_second, nanoseconds, node_count
from axonn_plugins.config import ConfigError
from axonn_recipes.bench.wire import Wire
from axonn_recipes.options import Run, at_least_one

STEADY, UNEVEN, LINKS, COMPUTE = "even", "one slow stage", "jitter in links", "jitter in compute"
SCENARIOS = (STEADY, UNEVEN, LINKS, COMPUTE)
_NUMBERS = ("ranks", "layers", "microbatches", "width", "tokens", "rounds", "parameters", "bucket_size")


_FEWEST = 4000
"""Parameters of four matrices of one row each, as coarsening has them."""


@dataclass(frozen=True, kw_only=True)
class Sizes(Wire):
    """A cluster, each of whose nodes is a rank, and a model of layers that take a given time.

    Attributes:
        ranks: emulated nodes of one rank.
        layers: of the model, which the stages divide.
        microbatches: of a batch that one pipeline computes; of all pipelines together in stages, scaling and memory.
        width: features.
        tokens: of a microbatch; one message has tokens·width numbers of 4 bytes.
        rounds: timed batches of every side; sides take turns.
        parameters: of a rank, in coarsening.
        bucket_size: elements of a bucket, in memory and coarsening.
        milliseconds: that a layer's forward pass takes, half of its backward.
        slow: times as long as the others the slow stage takes.
        jitter: share by which latency or compute differs at most, 0 to 1.
        latency: between nodes, one way.
        bandwidth: of a node in each direction.
    """

    ranks: int = 4
    layers: int = 8
    microbatches: int = 16
    width: int = 64
    tokens: int = 256
    rounds: int = 7
    parameters: int = 16_000_000
    bucket_size: int = 500_000
    milliseconds: float = 5.0
    slow: float = 1.5
    jitter: float = 0.5
    latency: str = "2ms"
    bandwidth: str | None = "1Gbit"


@dataclass(frozen=True, kw_only=True)
class Options(Sizes, Run):
    """The message-driven pipeline beside DeepSpeed's and torch's on emulated clusters, with layers that take a given time.

    Attributes:
        figure: schedules: all sides in four scenarios. stages: G_inter at fixed ranks (Figure 3.3). scaling: more ranks for
            one batch. memory: the bucketed optimizer on and off (Figure 3.4). coarsening: all-reduce and update overlapped
            (Figure 3.6).
        scenario: one of the scenarios; by itself all.
    """

    figure: Literal["schedules", "stages", "scaling", "memory", "coarsening"] = "schedules"
    scenario: Literal["even", "one slow stage", "jitter in links", "jitter in compute"] | None = None


@dataclass(frozen=True, kw_only=True)
class Settings(Sizes):
    """A run of sides on one emulated cluster.

    Attributes:
        stages: G_inter, which divides the ranks.
        scenario: of `SCENARIOS`.
    """

    stages: int = 4
    scenario: str = STEADY

    @property
    def link_jitter(self) -> float:
        """Jitter of the network."""
        return self.jitter if self.scenario == LINKS else 0.0


def resolve(options: Options) -> list[Settings]:
    """The runs that the command line asks for.

    Raises:
        ConfigError: the first mistake.
    """
    at_least_one(options, *_NUMBERS)
    node_count(options.ranks), nanoseconds(options.latency), bits_per_second(options.bandwidth)
    for name, low, high in (("milliseconds", 0.0, 1e4), ("slow", 1.0, 100.0), ("jitter", 0.0, 1.0)):
        if not low <= getattr(options, name) <= high:
            raise ConfigError(
                f"--{name} {getattr(options, name)} is not between {low:g} and {high:g}; choose one that is"
            )
    base = Settings(**{field.name: getattr(options, field.name) for field in fields(Sizes)}, stages=options.ranks)
    if options.figure == "schedules":
        runs = [replace(base, scenario=name) for name in SCENARIOS if options.scenario in (None, name)]
    elif options.figure in ("stages", "memory"):
        lengths = [n for n in range(2, base.ranks + 1) if base.ranks % n == 0]
        runs = [_shared(base, stages) for stages in lengths]
    elif options.figure == "scaling":
        counts = [n for n in range(2, base.ranks + 1) if base.ranks % n == 0]
        runs = [_shared(replace(base, ranks=ranks), 2) for ranks in counts if ranks % 2 == 0]
    else:
        runs = [base]
    if not runs or options.ranks < 2:
        least = "an even number of them" if options.figure == "scaling" else "2 or more"
        raise ConfigError(f"--ranks {options.ranks} make no pipeline for --figure {options.figure}; give {least}")
    if options.figure == "coarsening" and options.parameters < _FEWEST:
        raise ConfigError(f"--parameters {options.parameters} are too few to be timed; give {_FEWEST:,} or more")
    for run in runs:
        _check(run)
    return runs


def _shared(base: Settings, stages: int) -> Settings:
    """The same batch over as many pipelines as there are ranks for."""
    pipelines = base.ranks // stages
    if base.microbatches % pipelines:
        raise ConfigError(
            f"--microbatches {base.microbatches} do not divide by the {pipelines} pipelines of {stages} stages; use a multiple"
        )
    return replace(base, stages=stages, microbatches=base.microbatches // pipelines)


def _check(run: Settings) -> None:
    if run.layers % (2 * run.stages):
        raise ConfigError(
            f"--layers {run.layers} do not divide by the {2 * run.stages} parts that interleaved schedules make of {run.stages} stages; use "
            "a multiple"
        )


def described(figure: str, runs: list[Settings]) -> str:
    """The run in words."""
    first = runs[0]
    lines = [
        f"{run.ranks} emulated nodes of one rank, {run.ranks // run.stages} pipelines of {run.stages} stages, {run.microbatches} microbatches "
        f"each: {run.scenario}"
        for run in runs
    ]
    return "\n".join(
        [
            f"figure: {figure}; {first.wire}, latency {first.latency}, bandwidth {first.bandwidth}",
            *lines,
            f"{first.layers} layers of {first.milliseconds:g} ms forward and twice that backward, slept, so that ranks share the CPU as if each "
            f"had its own; messages of {4 * first.width * first.tokens:,} bytes",
            f"{first.rounds} timed batches of every side, in turns",
        ]
    )
