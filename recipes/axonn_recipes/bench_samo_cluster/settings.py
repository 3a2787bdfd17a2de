"""Settings of a run, read from the command line and checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_plugins.cluster.units import bits_per_second, nanoseconds, node_count
from axonn_plugins.config import ConfigError
from axonn_recipes.cluster_run import NUMBERS, ClusterRun, Place, Sizes
from axonn_recipes.options import Run, at_least_one, heads_fit
from axonn_recipes.pruned.plan import Dtype

HALF = "half"


@dataclass(frozen=True, kw_only=True)
class Options(Sizes, Place, Run):
    """Batch time of dense data parallelism and of SAMO on an emulated cluster, in one run.

    Attributes:
        bandwidth: of a node in each direction, such as 500Mbit; half: such that communication is half of the dense step.
        sparsity: share of the weights that is pruned.
        dtype: that the model computes with.
    """

    nodes: int = 4
    ranks_per_node: int = 1
    latency: str = "100us"
    bandwidth: str = HALF
    hidden: int = 256
    context: int = 64
    batch: int = 32
    rounds: int = 21
    sparsity: float = 0.9
    dtype: Dtype = "fp32"


@dataclass(frozen=True, kw_only=True)
class Settings(ClusterRun):
    """Everything that decides what is measured; `bandwidth` may be `HALF`."""

    bandwidth: str
    sparsity: float
    dtype: str


def resolve(options: Options) -> Settings:
    """Make the settings that the command line asks for.

    Raises:
        ConfigError: the first mistake.
    """
    at_least_one(options, "ranks_per_node", *NUMBERS)
    node_count(options.nodes), nanoseconds(options.latency)
    if options.bandwidth != HALF:
        bits_per_second(options.bandwidth)
    if not 0 <= options.sparsity < 1:
        raise ConfigError(f"--sparsity {options.sparsity} is not a share from 0 to below 1; use one such as 0.9")
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
            f"{settings.ranks} ranks on {settings.nodes} emulated nodes, {settings.wire}, latency {settings.latency}, bandwidth {bandwidth}",
            f"GPT: {settings.layers} blocks, hidden {settings.hidden}, {settings.heads} heads, "
            f"{settings.batch} x {settings.context} tokens a step, {settings.dtype}, {settings.sparsity:.0%} pruned",
            "dense: DistributedDataParallel, fused AdamW; SAMO: samo.Optimizer of the same, all-reduce overlapped with backward",
            f"{settings.rounds} timed steps of each side, in turns",
        ]
    )
