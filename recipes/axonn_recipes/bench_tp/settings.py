"""What a run of the benchmark is, read from the command line and checked before anything is started."""

from __future__ import annotations

import os
from dataclasses import dataclass

from axonn_plugins.cluster.units import bits_per_second, nanoseconds
from axonn_plugins.config import ConfigError
from axonn_recipes.cluster_run import NUMBERS, ClusterRun, Place, Sizes
from axonn_recipes.options import Run, at_least_one, heads_fit
from axonn_tp import Grid, factorisations

PEERS = {
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDP2, reshard_after_forward=True",
    "fsdp2-keep": "FSDP2, reshard_after_forward=False",
    "fsdp2+tp": "FSDP2 across nodes, DTensor tensor parallelism within",
    "hsdp": "FSDP2 within nodes, replicated across them",
    "tp": "DTensor tensor parallelism over all ranks",
    "zero3": "DeepSpeed ZeRO-3",
}
# The options of `axonn_tp.parallelize` that each stage of Figure 5.4 switches on, one after another.
_OFF: dict[str, object] = {"overlap_all_reduce": False, "overlap_reduce_scatter": False, "overlap_all_gather": False}
STAGES: list[tuple[str, dict[str, object]]] = [
    ("no overlap", _OFF),
    ("+OAR", _OFF | {"overlap_all_reduce": True}),
    ("+ORS", _OFF | {"overlap_all_reduce": True, "overlap_reduce_scatter": True}),
    ("+OAG", {}),
]

# Grids that split weights over z run with gathered weights kept, and let go after forward as FSDP2 does by default.
RESHARD = "reshard"


def options_of(side: str) -> dict[str, object]:
    """The options of a side of ours by what stands behind its grid."""
    return {"reshard_after_forward": True} if side == RESHARD else dict(STAGES).get(side, {})


@dataclass(frozen=True, kw_only=True)
class Settings(ClusterRun):
    """Everything that decides what is measured."""

    emulated: bool
    peers: tuple[str, ...]
    grids: tuple[Grid, ...]
    screen: bool


@dataclass(frozen=True, kw_only=True)
class Where(Sizes, Place):
    """The cluster and the model; with 1 node and no bandwidth, ranks of this machine."""

    nodes: int = 1
    ranks_per_node: int = 2
    latency: str = "0us"
    bandwidth: str | None = None
    hidden: int = 256
    context: int = 128
    batch: int = 16
    rounds: int = 7


@dataclass(frozen=True, kw_only=True)
class Options(Where, Run):
    """3D PMM and its peers, side by side in one run: on 1 node without bandwidth, on ranks of this machine.

    Attributes:
        grids: gx,gy,gz separated by spaces, as in "2,1,4 1,1,8"; or best, which tries all briefly.
        peers: some of these, separated by commas.
    """

    grids: str = "best"
    peers: str = ",".join(PEERS)


def under_torchrun() -> bool:
    """Whether torchrun, or another launcher that sets its variables, has started this process as a rank."""
    return {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= os.environ.keys()


def resolve(options: Where, grids: str, peers: str) -> Settings:
    """The run that the command line asks for.

    Args:
        options: the cluster and the model.
        grids: see `Options`.
        peers: see there.

    Raises:
        ConfigError: the first mistake.
    """
    at_least_one(options, "nodes", "ranks_per_node", *NUMBERS)
    nanoseconds(options.latency), bits_per_second(options.bandwidth)
    nodes, local = options.nodes, options.ranks_per_node
    if under_torchrun():
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // local
    emulated = not under_torchrun() and (nodes > 1 or options.bandwidth is not None)
    heads_fit(options.hidden, options.heads)
    chosen = tuple(peers.split(",")) if peers else ()
    for peer in chosen:
        if peer not in PEERS:
            raise ConfigError(f"--peers {peer} is not known; choose from {', '.join(PEERS)}")
    settings = Settings(
        **{name: getattr(options, name) for name in ("latency", "bandwidth", *NUMBERS)},
        nodes=nodes,
        ranks_per_node=local,
        emulated=emulated,
        peers=chosen,
        grids=_grids(grids, options, nodes * local),
        screen=grids == "best",
    )
    _check(settings)
    return settings


def _grids(asked: str, options: Where, ranks: int) -> tuple[Grid, ...]:
    if asked == "best":
        return tuple(grid for grid in factorisations(ranks) if _misfit(grid, options) is None)
    grids = []
    for text in asked.split():
        try:
            gx, gy, gz = (int(size) for size in text.split(","))
            grid = Grid.for_world(ranks, gx, gy, gz)
        except ValueError as error:
            reason = str(error) if "divide" in str(error) or "at least" in str(error) else "it is not three integers"
            raise ConfigError(f"--grids {text}: {reason}; write gx,gy,gz as in 2,1,4") from None
        if misfit := _misfit(grid, options):
            raise ConfigError(f"--grids {text}: {misfit}; choose another grid")
        grids.append(grid)
    return tuple(grids)


def _misfit(grid: Grid, options: Where) -> str | None:
    if options.heads % grid.gx:
        return f"--heads {options.heads} do not divide by gx = {grid.gx}"
    if options.hidden % grid.gy:
        return f"--hidden {options.hidden} does not divide by gy = {grid.gy}"
    if options.batch % grid.batch:
        return f"--batch {options.batch} does not divide by gz*gdata = {grid.batch}"
    return None


def _check(settings: Settings) -> None:
    """Whether every peer can be built.

    Raises:
        ConfigError: one cannot.
    """
    for peer in settings.peers:
        shards, width = settings.ranks, 1
        if peer == "tp":
            shards, width = 1, settings.ranks
        elif peer == "fsdp2+tp":
            shards, width = settings.nodes, settings.ranks_per_node
        if settings.batch % shards:
            raise ConfigError(
                f"--batch {settings.batch} does not divide by the {shards} ranks of {peer}; use a multiple"
            )
        if settings.heads % width:
            raise ConfigError(
                f"--heads {settings.heads} do not divide by the {width} tensor-parallel ranks of {peer}; use a multiple, "
                "or leave it out of --peers"
            )
    if not settings.grids:
        raise ConfigError("--grids best finds no grid that fits the model; change --batch, --heads or --hidden")


def described(settings: Settings) -> str:
    """The run in words."""
    where = "under torchrun" if under_torchrun() else "on this machine"
    if settings.emulated:
        where = f"emulated, latency {settings.latency}, bandwidth {settings.bandwidth or 'unlimited'} a node"
    grids = ", ".join(name(grid) for grid in settings.grids)
    lines = [
        f"{settings.ranks} ranks: {settings.nodes} nodes of {settings.ranks_per_node}, {where}",
        f"GPT: {settings.layers} blocks, hidden {settings.hidden}, {settings.heads} heads, "
        f"{settings.batch} x {settings.context} tokens a step, fp32, AdamW",
        f"ours: {'the fastest of ' if settings.screen else ''}{grids}",
        *(f"{peer}: {PEERS[peer]}" for peer in settings.peers),
        f"overlap stages, on our fastest grid: {', '.join(stage for stage, _ in STAGES)}",
        f"{settings.rounds} timed steps each, in turns",
    ]
    return "\n".join(lines)


def name(grid: Grid) -> str:
    """A grid in short."""
    return f"x{grid.gx} y{grid.gy} z{grid.gz} d{grid.gdata}"
