"""The plan of a run: the grid, the parameters and bytes of a rank, and the collectives of a step; all from shapes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from axonn_plugins.config import TensorParallel, parse
from axonn_plugins.hosts.deepspeed.engine import options
from axonn_recipes.models.gpt import GPT
from axonn_recipes.quickstart.settings import Settings
from axonn_tp import Collective, Grid, LayerPlan, Layout, Placement, place

ITEMSIZE = {"bf16": 2, "fp32": 4, "fp64": 8}
MIB = 2**20


@dataclass(frozen=True)
class Plan:
    """The arithmetic behind the report.

    Attributes:
        grid: the grid.
        parameters: of the whole model.
        local: parameters on one rank, by the group that sums their gradients.
        matmul: parameters that multiply activations, for FLOP counts.
        model: collectives of one step's forward and backward pass, on one rank.
        optimizer: collectives of one step's gradient sums and ZeRO-1 gathers, on one rank.
        memory: bytes of model state on one rank, by kind.
    """

    grid: Grid
    parameters: int
    local: dict[str, int]
    matmul: int
    model: list[Collective]
    optimizer: list[Collective]
    memory: dict[str, float]


def block_of(settings: Settings) -> TensorParallel:
    """The checked tensor_parallel block of the recipe."""
    block = parse(settings.ds_config()["axonn"]).tensor_parallel
    assert block is not None
    return block


def plan(settings: Settings, grid: Grid, layers: dict[str, LayerPlan]) -> Plan:
    """Count what `settings` mean on `grid`.

    Raises:
        ValueError: the plan does not fit the model.
    """
    with torch.device("meta"):
        model = GPT(settings.model)
    placements = place(model, grid, layers, options(block_of(settings)))
    local = _local_parameters(model, placements, grid)
    held = sum(local.values())
    rows = settings.batch // grid.batch * settings.context
    communicated = [
        collective
        for placement in placements
        for collective in placement.collectives(settings.context if placement.name == "positions" else rows, grid)
    ]
    stage = settings.ds_config()["zero_optimization"]["stage"]
    size = ITEMSIZE[settings.precision]
    shared = sum(count / _SUMMED[axis](grid) for axis, count in local.items()) if stage else held
    state: dict[str, float] = {"weights": held * size, "gradients": held * size}
    # AdamW keeps two moments; ZeRO and half precision keep a float32 master besides.
    masters = 12 if settings.precision != "fp64" else 16
    state["optimizer state"] = shared * masters
    return Plan(
        grid,
        sum(p.numel() for p in model.parameters()),
        local,
        sum(
            p.numel()
            for n, p in model.named_parameters()
            if p.dim() == 2 and "positions" not in n and "tokens" not in n
        )
        + (model.tokens.weight.numel() if settings.tied else 0),
        communicated,
        _optimizer_collectives(local, grid, stage),
        state,
    )


_SUMMED: dict[str, Callable[[Grid], int]] = {
    "data": lambda grid: grid.gdata,
    "batch": lambda grid: grid.batch,
    "tokens": lambda grid: grid.gx * grid.batch,
}


def _local_parameters(model: GPT, placements: list[Placement], grid: Grid) -> dict[str, int]:
    layouts: dict[int, Layout] = {}
    for placement in placements:
        for name, layout in placement.layouts().items():
            layouts[id(getattr(placement.module, name))] = layout
    held: dict[str, int] = defaultdict(int)
    for parameter in model.parameters():
        layout = layouts.get(id(parameter), Layout(tuple(parameter.shape)))
        # Groups of as many ranks are the same group.
        axis = layout.sum_axis if _SUMMED[layout.sum_axis](grid) != grid.batch else "batch"
        held[axis] += layout.local_numel(grid)
    return held


def _optimizer_collectives(local: dict[str, int], grid: Grid, stage: int) -> list[Collective]:
    """Gradients are summed as the layouts say; under ZeRO-1 a rank gets its share of the sums, and updated weights are gathered."""
    made = []
    for axis, elements in local.items():
        size = _SUMMED[axis](grid)
        share = -(-elements // size)
        if stage:
            made.append(Collective("reduce_scatter", axis, size, share * size))
            made.append(Collective("all_gather", axis, size, share))
        else:
            made.append(Collective("all_reduce", axis, size, elements))
    return [collective for collective in made if collective.size > 1]


def text(settings: Settings, counted: Plan, where: str) -> str:
    """The report to read."""
    grid = counted.grid
    size = ITEMSIZE[settings.precision]
    held = sum(counted.local.values())
    lines = [
        f"byte-level GPT: {settings.layers} layers, {settings.heads} heads, hidden {settings.hidden}, "
        f"{counted.parameters:,} parameters; {settings.precision}, {where}",
        "",
        grid.draw(),
        "",
        f"a rank holds {held:,} parameters ({held / counted.parameters:.1%}): "
        + ", ".join(f"{kind} {count / MIB:.1f} MiB" for kind, count in counted.memory.items()),
        f"a step is {settings.batch} windows of {settings.context} bytes; over each axis one rank calls and sends",
    ]
    totals: dict[tuple[str, str], tuple[int, Fraction]] = defaultdict(lambda: (0, Fraction(0)))
    for what, collectives in (("forward and backward", counted.model), ("gradients, weights", counted.optimizer)):
        for collective in collectives:
            calls, sent = totals[collective.axis, what]
            totals[collective.axis, what] = (calls + 1, sent + collective.sent * size)
    if not totals:
        lines.append("  nothing: there is one rank")
    for (axis, what), (calls, sent) in totals.items():
        name = {"batch": "z and data", "tokens": "x, z and data", "model": "x and y"}.get(axis, axis)
        lines.append(f"  {name:<13} {what:<20} {calls:>4} collectives {float(sent) / MIB:>9.2f} MiB")
    return "\n".join(lines)


def resolved(settings: Settings) -> str:
    """The DeepSpeed configuration as JSON."""
    config: dict[str, Any] = settings.ds_config()
    if settings.serial:
        del config["axonn"]
    return json.dumps(config, indent=2)
