"""What is measured, read from the command line and checked before anything is started."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from axonn_plugins.cluster.units import bits_per_second, nanoseconds, node_count
from axonn_plugins.config import ConfigError
from axonn_recipes.options import add_numbers, add_run, at_least_one

FIGURES = ("schedules", "stages", "scaling", "memory", "coarsening")
STEADY, UNEVEN, LINKS, COMPUTE = "even", "one slow stage", "jitter in links", "jitter in compute"
SCENARIOS = (STEADY, UNEVEN, LINKS, COMPUTE)
_NUMBERS = ("ranks", "layers", "microbatches", "width", "tokens", "rounds", "parameters", "bucket_size")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run of sides on one emulated cluster; each rank is a node.

    Attributes:
        ranks: nodes.
        stages: G_inter, which divides them.
        layers: of the model, which the stages divide.
        microbatches: of a pipeline in a batch.
        milliseconds: of a layer's forward pass; its backward pass takes twice that.
        slow: times as long as the others the slow stage takes.
        jitter: share by which latency or compute differs at most.
        latency: between nodes, one way, as for a cluster.
        bandwidth: of a node in each direction, as for a cluster.
        width: features.
        tokens: of a microbatch; one message has tokens·width numbers of 4 bytes.
        rounds: timed batches of every side.
        scenario: of `SCENARIOS`.
        parameters: of a rank, for memory and coarsening.
        bucket_size: of the bucketed optimizer.
    """

    ranks: int = 4
    stages: int = 4
    layers: int = 8
    microbatches: int = 16
    milliseconds: float = 5.0
    slow: float = 1.5
    jitter: float = 0.5
    latency: str = "2ms"
    bandwidth: str | None = "1Gbit"
    width: int = 64
    tokens: int = 256
    rounds: int = 7
    scenario: str = STEADY
    parameters: int = 16_000_000
    bucket_size: int = 500_000

    @property
    def link_jitter(self) -> float:
        """Of the network."""
        return self.jitter if self.scenario == LINKS else 0.0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="axonn bench pipeline",
        description="The message-driven pipeline beside DeepSpeed's and torch's on emulated clusters, with layers that take a given time.",
    )
    made.add_argument(
        "--figure",
        choices=FIGURES,
        default="schedules",
        help="schedules: all sides in four scenarios. stages: G_inter at fixed ranks (Figure 3.3). scaling: more ranks for one batch. memory: "
        "the bucketed optimizer on and off (Figure 3.4). coarsening: all-reduce and update overlapped (Figure 3.6). (default schedules)",
    )
    made.add_argument("--scenario", choices=SCENARIOS, help="one of the scenarios (default all)")
    default = Settings()
    texts = {
        "ranks": "emulated nodes of one rank",
        "layers": "of the model",
        "microbatches": "of a batch that one pipeline computes; of all pipelines together in stages, scaling and memory",
        "width": "features",
        "tokens": "of a microbatch",
        "rounds": "timed batches of every side; sides take turns",
        "parameters": "of a rank, in coarsening",
        "bucket_size": "elements of a bucket, in memory and coarsening",
    }
    add_numbers(made, ((name.replace("_", "-"), getattr(default, name), texts[name]) for name in _NUMBERS))
    made.add_argument(
        "--milliseconds",
        type=float,
        default=5.0,
        help="that a layer's forward pass takes, half of its backward (default 5)",
    )
    made.add_argument("--slow", type=float, default=1.5, help="times as long the slow stage takes (default 1.5)")
    made.add_argument("--jitter", type=float, default=0.5, help="of latency or compute, 0 to 1 (default 0.5)")
    made.add_argument("--latency", default="2ms", help="between nodes, one way (default 2ms)")
    made.add_argument("--bandwidth", default="1Gbit", help="of a node in each direction (default 1Gbit)")
    add_run(made, "bench_pipeline")
    return made


def resolve(options: argparse.Namespace) -> list[Settings]:
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
    given = (*_NUMBERS, "milliseconds", "slow", "jitter", "latency", "bandwidth")
    base = Settings(**{name: getattr(options, name) for name in given}, stages=options.ranks)
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
    if run.ranks < 2:
        raise ConfigError(f"--ranks {run.ranks} make no pipeline; give 2 or more")
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
            f"figure: {figure}; latency {first.latency}, bandwidth {first.bandwidth}",
            *lines,
            f"{first.layers} layers of {first.milliseconds:g} ms forward and twice that backward, slept, so that ranks share the CPU as if each "
            f"had its own; messages of {4 * first.width * first.tokens:,} bytes",
            f"{first.rounds} timed batches of every side, in turns",
        ]
    )
