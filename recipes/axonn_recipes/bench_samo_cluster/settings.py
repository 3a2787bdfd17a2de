"""What is measured, read from the command line and checked before anything is started."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from axonn_plugins.cluster.units import bits_per_second, nanoseconds, node_count
from axonn_plugins.config import ConfigError
from axonn_recipes.cluster_run import NUMBERS, ClusterRun, add_model
from axonn_recipes.options import add_run, at_least_one, heads_fit
from axonn_recipes.pruned.plan import DTYPES

HALF = "half"


@dataclass(frozen=True, kw_only=True)
class Settings(ClusterRun):
    """Everything that decides what is measured; `bandwidth` may be `HALF`."""

    bandwidth: str
    sparsity: float
    dtype: str


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="axonn bench samo_cluster",
        description="Batch time of dense data parallelism and of SAMO on an emulated cluster, in one run.",
    )
    made.add_argument("--nodes", type=int, default=4, help="emulated nodes (default 4)")
    made.add_argument("--ranks-per-node", type=int, default=1, help="(default 1)")
    made.add_argument("--latency", default="100us", help="between nodes, one way (default 100us)")
    made.add_argument(
        "--bandwidth",
        default=HALF,
        help="of a node in each direction, such as 500Mbit; half: such that communication is half of the dense step (default half)",
    )
    made.add_argument("--sparsity", type=float, default=0.9, help="(default 0.9)")
    made.add_argument("--dtype", choices=DTYPES, default="fp32", help="that the model computes with (default fp32)")
    add_model(made, hidden=256, context=64, batch=32, rounds=21)
    add_run(made, "bench_samo_cluster")
    return made


def resolve(options: argparse.Namespace) -> Settings:
    """What the command line asks for.

    Raises:
        ConfigError: the first mistake.
    """
    at_least_one(options, "ranks_per_node", *NUMBERS)
    node_count(options.nodes), nanoseconds(options.latency)
    if options.bandwidth != HALF:
        bits_per_second(options.bandwidth)
    if not 0 <= options.sparsity <= 1:
        raise ConfigError(f"--sparsity {options.sparsity} is not a share; give a number from 0 to 1, such as 0.9")
    heads_fit(options.hidden, options.heads)
    settings = Settings(**{name: getattr(options, name) for name in Settings.__dataclass_fields__ if name != "seed"})
    if settings.ranks < 2:
        raise ConfigError(f"--nodes {settings.nodes} of one rank each have nothing to communicate; give 2 or more")
    if settings.batch % settings.ranks:
        raise ConfigError(f"--batch {settings.batch} does not divide by the {settings.ranks} ranks; use a multiple")
    return settings


def described(settings: Settings) -> str:
    """The run in words."""
    bandwidth = settings.bandwidth
    if bandwidth == HALF:
        bandwidth = "such that communication is half of the dense step"
    return "\n".join(
        [
            f"{settings.ranks} ranks on {settings.nodes} emulated nodes, latency {settings.latency}, bandwidth {bandwidth}",
            f"GPT: {settings.layers} blocks, hidden {settings.hidden}, {settings.heads} heads, "
            f"{settings.batch} x {settings.context} tokens a step, {settings.dtype}, {settings.sparsity:.0%} pruned",
            "dense: DistributedDataParallel, fused AdamW; SAMO: samo.Optimizer of the same, all-reduce overlapped with backward",
            f"{settings.rounds} timed steps of each side, in turns",
        ]
    )
