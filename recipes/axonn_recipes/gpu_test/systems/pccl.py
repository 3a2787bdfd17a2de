"""PCCL's collectives beside the device's own library: the same values, and how long they take."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from axonn_plugins.pccl import Options, register
from axonn_recipes.bench.numbers import spread
from axonn_recipes.bench_pccl.measure import Side as Calls
from axonn_recipes.bench_pccl.measure import differences, times, torch_calls
from axonn_recipes.gpu_test.scale import Check, Figure, Found, Scale, Side

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def run(scale: Scale) -> Found:
    """Each collective at each size; sums of whole numbers, so that values are equal to the bit."""
    register()
    own = "nccl" if scale.device == "cuda" else "gloo"
    group = dist.new_group(backend=f"{scale.device}:pccl", pg_options=replace(Options.from_environment(), tune=False))
    sides: dict[str, Calls] = {"pccl": (torch_calls(group), None), own: (torch_calls(None), None)}
    found = Found()
    for collective in _COLLECTIVES:
        for size in scale.sizes:
            what = f"{collective} of {size:,} bytes"
            wrong = differences(collective, size, sides, scale.place)
            found.checks += [Check(f"{name}, {what}", difference, 0.0) for name, difference in wrong.items()]
            took = times(collective, size, sides, scale.rounds, scale.place)
            found.sides += [Side(f"{name}, {what}", name == "pccl", seconds) for name, seconds in took.items()]
            ratio = spread(took[own])["median"] / spread(took["pccl"])["median"]
            found.figures.append(Figure(f"{own} beside pccl, {what}", ratio, "x"))
    return found
