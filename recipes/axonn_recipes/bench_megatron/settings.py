"""Settings of a run, read from the command line and checked before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from axonn_plugins.cluster.units import bits_per_second, nanoseconds, node_count
from axonn_plugins.config import ConfigError
from axonn_recipes.bench.wire import Wire
from axonn_recipes.cluster_run import Batch, ClusterRun
from axonn_recipes.megatron_gpt.settings import Settings as Training
from axonn_recipes.options import Run, at_least_one, heads_fit
from axonn_tp import Grid
from axonn_tp.grid.mesh import factorisations

VARIANTS: Mapping[str, Mapping[str, bool]] = {
    "": {},
    "overlapped": {"overlap_grad_reduce": True},
    "overlapped, bf16 sums": {"overlap_grad_reduce": True, "grad_reduce_in_bf16": True},
    "overlapped, split optimizer": {
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "overlapped, split optimizer, bf16 sums": {
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "grad_reduce_in_bf16": True,
    },
}
"""Flags that both sides may turn on; the first set is Megatron's own defaults."""


@dataclass(frozen=True, kw_only=True)
class Steps(Batch):
    """A run of a side.

    Attributes:
        rounds: timed runs of each side, in turns.
        steps: timed steps of a run, after two that are not; a side's seconds in a round are their median.
        precision: of the model.
    """

    steps: int = 4
    precision: Literal["fp32", "bf16"] = "bf16"


@dataclass(frozen=True, kw_only=True)
class Options(Steps, Wire, Run):
    """Megatron's own tensor and data parallelism beside 3D PMM in Megatron, each on its best grid, on an emulated cluster.

    Attributes:
        nodes: emulated nodes; several, as in 1,2,4, are points of a figure.
        ranks_per_node: ranks on each node.
        hidden: hidden size, or one for each number of nodes.
        latency: between nodes, one way.
        bandwidth: of a node in each direction.
        grids: ours to choose from, such as "2,1,4 1,1,8"; by itself all.
    """

    nodes: str = "4"
    ranks_per_node: int = 2
    latency: str = "100us"
    bandwidth: str = "500Mbit"
    hidden: str = "512"
    grids: str = ""
    context: int = 128
    batch: int = 16
    rounds: int = 5


@dataclass(frozen=True, kw_only=True)
class Settings(Steps, ClusterRun):
    """One point of the figure.

    Attributes:
        grids: ours to choose from; all of these ranks when empty.
    """

    grids: tuple[tuple[int, int, int], ...] = ()

    def training(self, **changes: object) -> Training:
        """A side's run; sizes of the grid and switches are among the changes."""
        base = Training(
            ranks=self.ranks,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            context=self.context,
            batch=self.batch,
            steps=self.steps,
            seed=self.seed,
            precision=self.precision,
        )
        side = replace(base, **changes)  # type: ignore[arg-type]
        return replace(side, micro_batch=max(1, self.batch // side.data))

    def megatron(self) -> dict[str, Training]:
        """Megatron's own tensor and data parallelism, every way to split the ranks."""
        sizes = sorted({grid.gx for grid in factorisations(self.ranks)})
        found = {
            f"tensor {size} data {self.ranks // size}": self.training(
                tensor_model_parallel_impl="megatron", tensor_model_parallel_size=size
            )
            for size in sizes
        }
        return {name: side for name, side in found.items() if _fits(side)}

    def ours(self) -> dict[str, Training]:
        """3D PMM on every grid, or on those that were asked for, in both layouts of activations."""
        grids = [
            grid for grid in factorisations(self.ranks) if not self.grids or (grid.gx, grid.gy, grid.gz) in self.grids
        ]
        found = {}
        for grid in grids:
            scattered = self.training(axonn_gx=grid.gx, axonn_gy=grid.gy, axonn_gz=grid.gz)
            found[name(grid)] = scattered
            if grid.gx * grid.gy > 1:
                found[f"{name(grid)}, replicated"] = replace(scattered, axonn_layout="replicated")
        return {called: side for called, side in found.items() if _fits(side)}

    def variants(self, side: Training) -> dict[str, Training]:
        """A side with everything that Megatron may do beside: by what is turned on."""
        chosen = {
            called: on for called, on in VARIANTS.items() if self.precision == "bf16" or "grad_reduce_in_bf16" not in on
        }
        return {called: replace(side, **on) for called, on in chosen.items()}  # type: ignore[arg-type]


def _fits(side: Training) -> bool:
    try:
        side.check()
    except ConfigError:
        return False
    return True


def name(grid: Grid) -> str:
    """A grid in short."""
    return f"x{grid.gx} y{grid.gy} z{grid.gz} d{grid.gdata}"


def resolve(options: Options) -> list[Settings]:
    """The points that the command line asks for.

    Raises:
        ConfigError: the first mistake.
    """
    at_least_one(options, "ranks_per_node", "steps", *(field.name for field in fields(Batch)))
    nanoseconds(options.latency), bits_per_second(options.bandwidth)
    nodes, hidden = _integers(options.nodes, "--nodes"), _integers(options.hidden, "--hidden")
    if len(hidden) not in (1, len(nodes)):
        raise ConfigError(
            f"--hidden {options.hidden} has {len(hidden)} sizes for {len(nodes)} numbers of nodes; give one, or one for each"
        )
    grids = tuple(_grid(text) for text in options.grids.split())
    given = {field.name for field in fields(Settings)} & {field.name for field in fields(options)} - {
        "nodes",
        "hidden",
        "grids",
    }
    shared = {key: getattr(options, key) for key in given}
    points = [
        Settings(nodes=node_count(count), hidden=size, grids=grids, **shared)
        for count, size in zip(nodes, hidden * (len(nodes) // len(hidden)), strict=True)
    ]
    for point in points:
        heads_fit(point.hidden, point.heads)
        if point.ranks < 2:
            raise ConfigError("--nodes 1 with --ranks-per-node 1 has nothing to communicate; raise one of them")
        for side, found in (("Megatron", point.megatron()), ("--grids", point.ours())):
            if not found:
                raise ConfigError(
                    f"no way to split {point.ranks} ranks fits this model for {side}; change --batch {point.batch} or --heads {point.heads}"
                )
    return points


def _integers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text} is not a list of integers; write it as in 1,2,4") from None
    if min(numbers) < 1:
        raise ConfigError(f"{option} {text} holds a number below 1; give positive ones")
    return numbers


def _grid(text: str) -> tuple[int, int, int]:
    sizes = _integers(text, "--grids")
    if len(sizes) != 3:
        raise ConfigError(f"--grids {text} is not gx,gy,gz; write it as in 2,1,4")
    return sizes[0], sizes[1], sizes[2]


def described(points: list[Settings]) -> str:
    """The run in words."""
    first = points[0]
    where = ", ".join(f"{point.ranks} ranks on {point.nodes} nodes with hidden {point.hidden}" for point in points)
    return "\n".join(
        [
            f"{where}; {first.wire}, emulated, latency {first.latency}, bandwidth {first.bandwidth} a node",
            f"GPT: {first.layers} layers, {first.heads} heads, {first.batch} x {first.context} tokens a step, {first.precision}",
            "both sides: megatron.core's model, gradient buffers and optimizer; each side's fastest split of the ranks, with what "
            "Megatron may overlap and split turned on or not, whichever is faster",
            f"{first.rounds} runs of {first.steps} timed steps, in turns",
        ]
    )
