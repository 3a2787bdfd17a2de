"""``axonn bench context``: one long sequence over all ranks, ours beside torch's context_parallel and DeepSpeed's Ulysses."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Sequence
from functools import partial

import torch.distributed as dist

from axonn_plugins import processors
from axonn_plugins.cli.options import read
from axonn_plugins.cluster import Cluster
from axonn_plugins.cluster.launch import launch
from axonn_plugins.config import ConfigError
from axonn_recipes.bench.claims import beside
from axonn_recipes.bench.output import publish
from axonn_recipes.bench.rounds import check_losses
from axonn_recipes.bench_context import sides
from axonn_recipes.bench_context.settings import Options, Settings, described, name, resolve
from axonn_recipes.bench_tp.measure import TOLERANCE, Side, first_steps, take_turns
from axonn_recipes.bench_tp.report import against, brief, brief_text
from axonn_recipes.runs import new_folder


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's, no cluster can be emulated here, or sides that do not compute the same.
    """
    options = read(Options, arguments, "axonn bench context")
    settings = resolve(options)
    folder = new_folder(options.runs, options.name, "bench_context")
    print(described(settings), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    if "ulysses" in settings.peers and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError("--peers ulysses is DeepSpeed's, which is not installed; install deepspeed, or leave it out")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    numbers = brief(settings, run(settings))
    said = beside(__file__, lambda words: resolve(read(Options, words)), settings, against(numbers))
    publish(folder, numbers, "\n".join([brief_text(numbers), *said]))
    return 0


def run(settings: Settings) -> list[Side]:
    """Measure on a cluster of its own, or on ranks of this machine."""
    if not settings.emulated:
        return launch(measure, settings.ranks, settings)[0]
    with Cluster(settings.nodes, settings.latency, settings.bandwidth) as cluster:
        return cluster.launch(measure, settings.ranks_per_node, settings)[0]


def measure(settings: Settings) -> list[Side]:
    """The work of each rank: build every side, check that all learn alike, and time them in turns.

    Raises:
        ConfigError: the sides do not compute the same losses.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    processors.share_among(settings.ranks)
    dist.init_process_group(settings.wire)
    chosen = [Side(which, "peer", partial(sides.peer, settings, which)) for which in settings.peers]
    chosen += [Side(name(*side), "ours", partial(sides.ours, settings, *side)) for side in settings.ours]
    steps = {side.name: first_steps(side) for side in chosen}
    check_losses(chosen, TOLERANCE, advice="leave one out")
    take_turns(chosen, steps, settings.rounds)
    return chosen
