"""Settings of a run of the benchmark, read from the command line and checked before anything is started."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch

from axonn_plugins.cluster.units import bits_per_second, nanoseconds, node_count
from axonn_plugins.config import ConfigError
from axonn_recipes.bench_tp.networks import NETWORKS, Network, unet_sizes
from axonn_recipes.cluster_run import NUMBERS, ClusterRun, Place, Sizes
from axonn_recipes.options import Run, at_least_one, heads_fit
from axonn_tp import Grid, factorisations, place

PEERS = {
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDP2, reshard_after_forward=True",
    "fsdp2-keep": "FSDP2, reshard_after_forward=False",
    "fsdp2+tp": "FSDP2 across nodes, DTensor tensor parallelism within",
    "hsdp": "FSDP2 within nodes, replicated across them",
    "tp": "DTensor tensor parallelism over all ranks",
    "zero3": "DeepSpeed ZeRO-3",
}
OF_GPTS = ("fsdp2+tp", "tp")
"""Peers that name a GPT's layers."""
# The options of `axonn_tp.parallelize` that each stage of Figure 5.4 switches on, one after another.
_OFF: dict[str, object] = {"overlap_all_reduce": False, "overlap_reduce_scatter": False, "overlap_all_gather": False}
STAGES: list[tuple[str, dict[str, object]]] = [
    ("no overlap", _OFF),
    ("+OAR", _OFF | {"overlap_all_reduce": True}),
    ("+ORS", _OFF | {"overlap_all_reduce": True, "overlap_reduce_scatter": True}),
    ("+OAG", {}),
]

# Grids that split weights over z run with gathered weights kept, with those of half the layers let go after forward, and with all, as FSDP2 does
# by default.
RESHARDED: dict[str, dict[str, object]] = {
    "reshard half": {"reshard_after_forward": 0.5},
    "reshard": {"reshard_after_forward": True},
}

# Grids with data-parallel ranks run with the optimizer's states on each, with a share of them, and with a share of gradients, too.
SHARDED = {"ZeRO-1": 1, "ZeRO-2": 2}

# Those that split layers over x or y, too, run once more with a share of each layer's input kept, of which backward gathers the rest.
AGAIN: dict[str, dict[str, object]] = {"inputs again": {"regather_inputs": True}}


def ways(grid: Grid) -> list[str]:
    """Ways in which a grid trains, the usual one first, which has no name."""
    weights, states = ["", *(RESHARDED if grid.gz > 1 else ())], ["", *(SHARDED if grid.gdata > 1 else ())]
    again = [("", states[-1], *AGAIN)] if grid.gx * grid.gy > 1 and grid.gz > 1 else []
    return [", ".join(filter(None, way)) for way in [*product(weights, states), *again]]


def options_of(way: str) -> dict[str, object]:
    """The options of a side of ours by what stands behind its grid: of `ways` or `STAGES`."""
    named = dict((*RESHARDED.items(), *AGAIN.items(), *STAGES))
    return {option: value for name in way.split(", ") for option, value in named.get(name, {}).items()}


def stage_of(way: str) -> int:
    """The stage of ZeRO, likewise."""
    return next((stage for name, stage in SHARDED.items() if name in way.split(", ")), 0)


@dataclass(frozen=True, kw_only=True)
class Settings(ClusterRun):
    """Everything that decides what is measured."""

    emulated: bool
    peers: tuple[str, ...]
    grids: tuple[Grid, ...]
    screen: bool
    network: str = "gpt"
    dtype: str = "float32"
    timeline: bool = False

    @property
    def trained(self) -> Network:
        """The network that is trained."""
        return NETWORKS[self.network]

    @property
    def samples(self) -> int:
        """Tokens of a step, or images."""
        return self.tokens if self.network == "gpt" else self.batch


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
        model: of a unet, --hidden are channels, --layers blocks of each of three levels, --context pixels of an image's side.
        grids: gx,gy,gz separated by spaces, as in "2,1,4 1,1,8"; or best, which tries all briefly.
        peers: some of these, separated by commas; by itself all, of a unet those without tensor parallelism.
        timeline: of every side watch one more step, and say where each of its milliseconds went, on CPUs.
    """

    model: Literal["gpt", "unet"] = "gpt"
    grids: str = "best"
    peers: str | None = None
    timeline: bool = False


def under_torchrun() -> bool:
    """True if torchrun, or another launcher that sets its variables, has started this process as a rank."""
    return {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= os.environ.keys()


def resolve(options: Options) -> Settings:
    """The run that the command line asks for.

    Raises:
        ConfigError: the first mistake.
    """
    settings = run_on(options, options.grids, options.peers, options.model)
    return replace(settings, timeline=options.timeline)


def run_on(options: Where, grids: str, peers: str | None, network: str = "gpt") -> Settings:
    """The run of a model on a cluster.

    Args:
        options: the cluster and the model.
        grids: see `Options`.
        peers: see there.
        network: a key of `NETWORKS`.

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
    if emulated:
        node_count(nodes)
    heads_fit(options.hidden, options.heads)
    able = [peer for peer in PEERS if network == "gpt" or peer not in OF_GPTS]
    chosen = tuple(able if peers is None else peers.split(",") if peers else ())
    for peer in chosen:
        if peer not in PEERS:
            raise ConfigError(f"--peers {peer} is not known; choose from {', '.join(PEERS)}")
        if peer not in able:
            raise ConfigError(f"--peers {peer} splits a GPT's layers, not a U-Net's; choose from {', '.join(able)}")
    settings = Settings(
        **{name: getattr(options, name) for name in ("latency", "bandwidth", "backend", *NUMBERS)},
        nodes=nodes,
        ranks_per_node=local,
        emulated=emulated,
        peers=chosen,
        grids=(),
        screen=grids == "best",
        network=network,
    )
    settings = replace(settings, grids=_grids(grids, settings))
    _check(settings)
    return settings


def _grids(asked: str, settings: Settings) -> tuple[Grid, ...]:
    ranks = settings.ranks
    if asked == "best":
        return tuple(grid for grid in factorisations(ranks) if _misfit(grid, settings) is None)
    grids = []
    for text in asked.split():
        try:
            gx, gy, gz = (int(size) for size in text.split(","))
            grid = Grid.for_world(ranks, gx, gy, gz)
        except ValueError as error:
            reason = str(error) if "divide" in str(error) or "at least" in str(error) else "it is not three integers"
            raise ConfigError(f"--grids {text}: {reason}; write gx,gy,gz as in 2,1,4") from None
        if misfit := _misfit(grid, settings):
            raise ConfigError(f"--grids {text}: {misfit}; choose another grid")
        grids.append(grid)
    return tuple(grids)


def _misfit(grid: Grid, settings: Settings) -> str | None:
    if settings.heads % grid.gx:
        return f"--heads {settings.heads} do not divide by gx = {grid.gx}"
    if settings.hidden % grid.gy:
        return f"--hidden {settings.hidden} does not divide by gy = {grid.gy}"
    if settings.batch % grid.batch:
        return f"--batch {settings.batch} does not divide by gz*gdata = {grid.batch}"
    if settings.network != "gpt":
        with torch.device("meta"):
            model = settings.trained.build(settings)
        try:
            place(model, grid, settings.trained.plan(settings))
        except ValueError as error:
            return str(error)
    return None


def _check(settings: Settings) -> None:
    """Refuse sizes with which a peer cannot be built.

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
        f"{settings.ranks} ranks: {settings.nodes} nodes of {settings.ranks_per_node}, {settings.wire}, {where}",
        f"{_described_network(settings)} a step, fp32, AdamW",
        f"ours: {'the fastest of ' if settings.screen else ''}{grids}",
        *(f"{peer}: {PEERS[peer]}" for peer in settings.peers),
        f"overlap stages, on our fastest grid: {', '.join(stage for stage, _ in STAGES)}",
        f"{settings.rounds} timed steps each, in turns",
    ]
    return "\n".join(lines)


def _described_network(settings: Settings) -> str:
    if settings.network == "gpt":
        return (
            f"GPT: {settings.layers} blocks, hidden {settings.hidden}, {settings.heads} heads, "
            f"{settings.batch} x {settings.context} tokens"
        )
    sizes, side = unet_sizes(settings), settings.context
    return (
        f"U-Net: {sizes.channels} channels x {sizes.multipliers}, {sizes.blocks} blocks a level, {sizes.heads} heads, "
        f"{settings.batch} images of {side} x {side}"
    )


def name(grid: Grid) -> str:
    """A grid in short."""
    return f"x{grid.gx} y{grid.gy} z{grid.gz} d{grid.gdata}"
