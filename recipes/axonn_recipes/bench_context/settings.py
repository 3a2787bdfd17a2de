"""Settings of a run, read from the command line and checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_plugins.cluster.units import bits_per_second, nanoseconds, node_count
from axonn_plugins.config import ConfigError
from axonn_recipes.cluster_run import NUMBERS, ClusterRun, Place, Sizes
from axonn_recipes.options import Run, at_least_one, heads_fit
from axonn_tp import Grid
from axonn_tp.context.chunks import HOW

PEERS = {
    "torch-gather": "torch's ring attention (context_parallel), keys and values gathered, which is its default; FSDP2",
    "torch-ring": "the same, keys and values from rank to rank; FSDP2",
    "ulysses": "DeepSpeed's DistributedAttention: heads for tokens by all-to-alls; FSDP2",
}


@dataclass(frozen=True, kw_only=True)
class Options(Sizes, Place, Run):
    """One long sequence over all ranks: shared sequences of 3D PMM beside torch's and DeepSpeed's, on an emulated cluster.

    Attributes:
        peers: some of these, separated by commas; by itself all.
        ours: gx and what travels, as in "1:heads 2:ring"; the other ranks share the sequence.
        local: no emulated network: all ranks talk through loopback.
    """

    nodes: int = 4
    ranks_per_node: int = 2
    latency: str = "100us"
    bandwidth: str | None = "500Mbit"
    layers: int = 2
    hidden: int = 64
    context: int = 8192
    batch: int = 1
    rounds: int = 5
    peers: str | None = None
    ours: str = "1:gather 1:ring 1:heads"
    local: bool = False


@dataclass(frozen=True, kw_only=True)
class Settings(ClusterRun):
    """Everything that decides what is measured.

    Attributes:
        peers: by key of `PEERS`.
        ours: ranks along x, and a way of `HOW`.
        emulated: whether there is a network between nodes.
    """

    peers: tuple[str, ...]
    ours: tuple[tuple[int, str], ...]
    emulated: bool

    def grid(self, gx: int) -> Grid:
        """This suite's grid: what x leaves shares the sequence."""
        return Grid(gx=gx, gz=self.ranks // gx, sequence=self.ranks // gx)


def name(gx: int, how: str) -> str:
    """A side of ours in short."""
    return f"ours, {how}" if gx == 1 else f"ours, x{gx}, {how}"


def resolve(options: Options) -> Settings:
    """The run that the command line asks for.

    Raises:
        ConfigError: the first mistake.
    """
    at_least_one(options, "ranks_per_node", *NUMBERS)
    nanoseconds(options.latency), bits_per_second(options.bandwidth)
    heads_fit(options.hidden, options.heads)
    peers = tuple(PEERS if options.peers is None else options.peers.split(",") if options.peers else ())
    for peer in peers:
        if peer not in PEERS:
            raise ConfigError(f"--peers {peer} is not known; choose from {', '.join(PEERS)}")
    settings = Settings(
        **{name: getattr(options, name) for name in (*NUMBERS, "latency", "bandwidth", "backend", "ranks_per_node")},
        nodes=node_count(options.nodes),
        peers=peers,
        ours=tuple(_side(text) for text in options.ours.split()),
        emulated=not options.local,
    )
    _check(settings)
    return settings


def _side(text: str) -> tuple[int, str]:
    gx, _, how = text.partition(":")
    if not gx.isdecimal() or int(gx) < 1 or how not in HOW:
        raise ConfigError(f"--ours {text} is not gx:how; write 1:gather, 2:ring or 1:heads")
    return int(gx), how


def _check(settings: Settings) -> None:
    ranks, tokens = settings.ranks, settings.context
    if ranks < 2:
        raise ConfigError("--nodes 1 with --ranks-per-node 1 has nobody to share a sequence with; raise one of them")
    if settings.peers and tokens % (2 * ranks):
        raise ConfigError(
            f"--context {tokens} is no multiple of {2 * ranks}, twice the ranks, into which torch cuts a sequence; change it, or use --peers ''"
        )
    if "ulysses" in settings.peers and settings.heads % ranks:
        raise ConfigError(
            f"--heads {settings.heads} do not divide by the {ranks} ranks of ulysses; use a multiple, or leave it out of --peers"
        )
    for gx, how in settings.ours:
        if ranks % gx or settings.heads % gx:
            raise ConfigError(
                f"--ours {gx}:{how} divides not both the {ranks} ranks and --heads {settings.heads}; choose another gx"
            )
        if how == "heads" and settings.heads % ranks:
            raise ConfigError(
                f"--ours {gx}:heads deals out --heads {settings.heads} among {ranks} ranks, which do not divide; use gather or ring"
            )
    if not settings.ours:
        raise ConfigError("--ours names no side; write 1:gather")


def described(settings: Settings) -> str:
    """The run in words."""
    where = f"latency {settings.latency}, bandwidth {settings.bandwidth or 'unlimited'} a node"
    return "\n".join(
        [
            f"{settings.ranks} ranks: {settings.nodes} nodes of {settings.ranks_per_node}, {settings.wire}, "
            + (where if settings.emulated else "ranks of this machine"),
            f"GPT: {settings.layers} blocks, hidden {settings.hidden}, {settings.heads} heads, fp32, AdamW; {settings.batch} x "
            f"{settings.context} tokens a step, every sequence over all ranks",
            *(f"{peer}: {PEERS[peer]}" for peer in settings.peers),
            f"ours: {', '.join(name(*side) for side in settings.ours)}; weights over z",
            "Megatron's own context parallelism needs Transformer Engine, and with it a GPU: it is not measured here",
            f"{settings.rounds} timed steps each, in turns",
        ]
    )
