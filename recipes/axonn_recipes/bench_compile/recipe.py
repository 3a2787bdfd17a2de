"""``axonn bench compile``: a split GPT's step as it is, in both layouts, and compiled."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

import axonn_tp
from axonn_plugins.cli.options import read
from axonn_plugins.cluster.launch import launch
from axonn_plugins.config import ConfigError
from axonn_recipes.bench.numbers import ratio, spread
from axonn_recipes.bench.output import compared, ms, publish, quartiles, table
from axonn_recipes.bench.rounds import apart, check_losses, in_turns, over_ranks, slowest
from axonn_recipes.bench_tp.settings import under_torchrun
from axonn_recipes.bench_tp.sides import Step, device, step_of
from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_recipes.options import Run, at_least_one, heads_fit
from axonn_recipes.runs import new_folder
from axonn_tp import Grid

_TOLERANCES = {"float32": 1e-4, "float64": 1e-9, "bfloat16": 5e-2}
_LOSSES = 3


@dataclass(frozen=True, kw_only=True)
class Options(Run):
    """A split GPT's step as it is, in both layouts, and compiled, in turns.

    Attributes:
        ranks: of this machine, without torchrun.
        gx: ranks that split features of outputs.
        gy: ranks that split features of inputs.
        gz: ranks that share weights.
        layers: blocks.
        hidden: features.
        heads: of attention.
        context: tokens of a window.
        batch: windows of a step, over all ranks.
        dtype: of the weights.
        backend: torch.compile's.
        rounds: timed steps of each side.
    """

    ranks: int = 2
    gx: int = 2
    gy: int = 1
    gz: int = 1
    layers: int = 2
    hidden: int = 256
    heads: int = 8
    context: int = 128
    batch: int = 8
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    backend: str = "inductor"
    rounds: int = 9


@dataclass
class Side:
    """Measurements of a side.

    Attributes:
        name: as shown.
        losses: of its first steps.
        seconds: of each timed step, the slowest rank's.
        first: seconds of the first step.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    first: float = 0.0


SIDES: dict[str, dict[str, Any]] = {
    "scattered": {},
    "replicated": {"layout": "replicated"},
    "compiled": {"layout": "replicated", "compile": True},
}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's, or sides that do not compute the same.
    """
    options = read(Options, arguments, "axonn bench compile")
    at_least_one(options, "ranks", "gx", "gy", "gz", "layers", "hidden", "heads", "context", "batch", "rounds")
    heads_fit(options.hidden, options.heads)
    _check(options)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        print(f"{options.layers} layers of {options.hidden} features, {options.dtype}, {options.backend}", flush=True)
    if options.dry_run:
        return 0
    folder = new_folder(options.runs, options.name, "bench_compile") if first else None
    sides = measure(options) if under_torchrun() else launch(measure, options.ranks, options)[0]
    if folder:
        check_losses(sides, _TOLERANCES[options.dtype], relative=True)
        publish(folder, [asdict(side) for side in sides], text(sides))
    return 0


def _check(options: Options) -> None:
    """Refuse a grid that the ranks or the batch do not divide by."""
    ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else options.ranks
    try:
        grid = Grid.for_world(ranks, options.gx, options.gy, options.gz)
    except ValueError as error:
        raise ConfigError(f"--gx, --gy and --gz: {error}") from None
    if options.batch % grid.batch:
        raise ConfigError(f"--batch {options.batch} does not divide by gz*gdata = {grid.batch}; use a multiple")


def measure(options: Options) -> list[Side]:
    """Time all sides on this rank's device; the same on every rank."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # ranks may be forked
    warnings.filterwarnings("ignore", category=UserWarning)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    mesh = axonn_tp.Mesh.create(gx=options.gx, gy=options.gy, gz=options.gz)
    steps = {name: _step(options, mesh, name) for name in SIDES}
    sides = {name: Side(name) for name in SIDES}
    for name, side in sides.items():
        losses: list[Tensor] = []
        side.first = slowest(partial(_kept, losses, steps[name]))
        losses += [steps[name]() for _ in range(_LOSSES - 1)]
        side.losses = [total / dist.get_world_size() for total in over_ranks([*map(float, losses)], dist.ReduceOp.SUM)]
    for _, side in in_turns(list(sides.values()), options.rounds):
        side.seconds.append(slowest(steps[side.name]))
    return list(sides.values())


def _kept(losses: list[Tensor], step: Step) -> None:
    losses.append(step())


def _step(options: Options, mesh: axonn_tp.Mesh, name: str) -> Step:
    config = GPTConfig(context=options.context, layers=options.layers, heads=options.heads, hidden=options.hidden)
    torch.manual_seed(0)
    model: Any = GPT(config).to(device(), getattr(torch, options.dtype))
    axonn_tp.parallelize(model, mesh, "auto", axonn_tp.Options(**SIDES[name]))
    tokens = torch.randint(config.vocabulary, (options.batch, config.context + 1), device=device())
    batch = [mesh.shard_batch(part) for part in (tokens[:, :-1], tokens[:, 1:])]
    reducer = axonn_tp.GradientReducer(model.parameters(), mesh)
    trained: Any = torch.compile(model, backend=options.backend) if name == "compiled" else model
    return step_of(trained, batch, reducer.finish)


def text(sides: Sequence[Side]) -> str:
    """The table."""
    reference = sides[0]
    return table(
        {
            "side": lambda side: side.name,
            "step, ms": lambda side: ms(spread(side.seconds)["median"]),
            "quartiles": lambda side: quartiles(spread(side.seconds)),
            "scattered / this": lambda side: compared(ratio(reference.seconds, side.seconds)),
            "first step, s": lambda side: f"{side.first:.1f}",
            "losses apart": lambda side: f"{apart(reference.losses, side.losses, True):.1e}",
        },
        sides,
    )
