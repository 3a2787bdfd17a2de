"""The work of each rank: build the sides and time their steps in turns."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

import samo
from axonn_plugins import processors
from axonn_plugins.cluster import Cluster
from axonn_plugins.observe.ledger import Ledger
from axonn_recipes.bench.rounds import in_turns, slowest
from axonn_recipes.bench_samo_cluster.settings import Settings
from axonn_recipes.models.gpt import GPT
from axonn_recipes.pruned.plan import DTYPES, Plan
from axonn_recipes.pruned.sides import Dense, Pruned
from axonn_recipes.pruned.train import reduced_bytes

DENSE, SAMO = "dense", "samo"
ALONE = ", no communication"
_WARM_UP = 3  # the first steps allocate, and DistributedDataParallel lays out its buckets anew


@dataclass
class Side:
    """One side and what was measured of it; all numbers are the same on every rank.

    Attributes:
        name: shown in the table.
        seconds: of each timed step, the slowest rank's.
        reduced: bytes that a rank hands to all-reduces in a step.
        wire: bytes that all nodes send in a step, headers included.
        state: bytes of weights, gradients and optimizer state on a rank.
        kept: parameters that are not pruned.
        parameters: all of them.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    reduced: int = 0
    wire: float = 0.0
    state: int = 0
    kept: int = 0
    parameters: int = 0


def measure(settings: Settings, cluster: Cluster) -> list[Side]:
    """Time all sides; every rank calls it, and has the result."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    processors.share_among(settings.ranks)
    dist.init_process_group(settings.wire)
    made = [_build(name, settings) for name in (DENSE, DENSE + ALONE, SAMO, SAMO + ALONE)]
    for side, step in made:
        for _ in range(_WARM_UP):
            step()
        with Ledger() as ledger:
            step()
        side.reduced = reduced_bytes(ledger)
    for _, (side, step) in in_turns(made, settings.rounds):
        before = _sent(cluster)
        side.seconds.append(slowest(step))
        side.wire += (_sent(cluster) - before) / settings.rounds
    return [side for side, _ in made]


def _build(name: str, settings: Settings) -> tuple[Side, Callable[[], None]]:
    torch.manual_seed(settings.seed)
    model = GPT(settings.model).to(DTYPES[settings.dtype])
    plan = Plan(ranks=settings.ranks, clip=None)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    side = Side(name, kept=parameters, parameters=parameters)
    trained: Dense | Pruned
    if name.startswith(DENSE):
        trained = Dense(model, plan)
    else:
        masks = samo.magnitude(model, settings.sparsity)
        trained = Pruned(model, plan, alone=name.endswith(ALONE))
        trained.prune(masks)
        side.kept -= sum(int((~mask).sum()) for mask in masks.values())
    generator = torch.Generator().manual_seed(settings.seed)
    windows = torch.randint(256, (settings.batch, settings.context + 1), generator=generator)
    share = windows.chunk(settings.ranks)[dist.get_rank()]

    def step() -> None:
        with trained.no_sync() if name == DENSE + ALONE else nullcontext():
            trained.model(share[:, :-1], share[:, 1:]).backward()
        trained.step(plan.lr)
        side.state = trained.state_bytes()

    return side, step


def _sent(cluster: Cluster) -> int:
    return sum(traffic.sent for traffic in cluster.bytes())
