"""``axonn test ted``: TED beside stock DeepSpeed-MoE, the same weights, data and seeds, on this machine's ranks or a cluster's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from axonn_plugins.ted import regression_training, stock
from ted_moe import Topology

BARS = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 2e-2}
"""The largest relative difference allowed, by type of number; gates, and the weights of routes, are in float32 always."""
_GATES: dict[str, dict[str, Any]] = {
    "top-1": {"k": 1, "use_rts": False, "capacity_factor": 1.0, "min_capacity": 1},
    "top-2, residual": {"k": 2, "capacity_factor": 0.9, "min_capacity": 0, "use_residual": True},
    "top-4": {"k": 4, "capacity_factor": 0.7, "min_capacity": 0},
    "top-1, none dropped": {"k": 1, "use_rts": False, "drop_tokens": False, "min_capacity": 0},
    "top-2, none dropped": {"k": 2, "drop_tokens": False},
}
_SWITCHES: dict[str, dict[str, bool]] = {
    "all on": {},
    "not fused": {"fused": False},
    "all off": {"duplicate_token_dropping": False},
    "dropless": {"dropless": True},
}


@dataclass(frozen=True)
class Case:
    """A line of the table.

    Attributes:
        name: what is compared.
        bar: the largest relative difference allowed.
        measure: finds the largest on this rank, and says of what; every rank calls it.
    """

    name: str
    bar: float
    measure: Callable[[], tuple[float, str]]


def cases(ranks: int, dtype: torch.dtype, device: str) -> list[Case]:
    """The layer on all topologies of so many ranks, and trainings."""
    found = []
    for topology in topologies(ranks):
        for gate, switches in _kinds(topology):
            name = f"{_name(topology)}  {gate}, {switches}"
            measure = partial(_layer, topology, gate, switches, dtype, device)
            found.append(Case(name, BARS[dtype], measure))
    for topology in topologies(ranks):
        if topology.expert_tensor_parallel:
            found.append(
                Case(
                    f"{_name(topology)}  training",
                    regression_training.BARS[dtype],
                    partial(regression_training.difference, topology, dtype, device),
                )
            )
    return found


def topologies(ranks: int) -> list[Topology]:
    """Tensor × expert × data in all factorisations, then those with experts whole on tensor ranks."""
    found = []
    for tensor in _divisors(ranks):
        found += [Topology(ranks, tensor, expert) for expert in _divisors(ranks // tensor)]
    for tensor in _divisors(ranks)[1:]:
        inside = [expert for expert in _divisors(ranks) if expert % tensor == 0 or tensor % expert == 0]
        found += [Topology(ranks, tensor, expert, expert_tensor_parallel=False) for expert in inside]
    return found


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _name(topology: Topology) -> str:
    whole = "" if topology.expert_tensor_parallel else " (whole)"
    return f"tensor {topology.tensor}, expert {topology.expert}{whole}, data {topology.expert_data}"


def _kinds(topology: Topology) -> Iterator[tuple[str, str]]:
    for gate, options in _GATES.items():
        for switches in _SWITCHES:
            off = switches in ("not fused", "all off")
            if off and (topology.tensor == 1 or not topology.expert_tensor_parallel):
                continue
            if switches == "dropless" and options.get("drop_tokens", True):
                continue
            yield gate, switches


def multiple(ranks: int, least: int) -> int:
    """The smallest multiple of `ranks` from `least` on, so that every degree divides it."""
    return -(-least // ranks) * ranks


def _layer(topology: Topology, gate: str, switches: str, dtype: torch.dtype, device: str) -> tuple[float, str]:
    kinds = (stock.Plain, stock.Gated, stock.Residual, stock.Single)
    kind = kinds[(topology.tensor + topology.expert + len(gate)) % len(kinds)]
    expert = partial(kind, multiple(topology.world, 16))
    options = {"top2_2nd_expert_sampling": False} | _GATES[gate]
    experts = multiple(topology.world, 8)
    worst = 0.0, "output"
    for routing, tokens in _ROUTINGS.items():
        case = stock.Comparison(topology, expert, options, _SWITCHES[switches], tokens, experts, dtype, device)
        for what, value in stock.over_ranks(stock.differences(case)).items():
            worst = max(worst, (value, f"{what}, {routing}"))
    return worst


def _one_expert(data: int) -> Tensor:
    """All tokens of every second rank are the same, so one expert gets them, and others none."""
    tokens = stock.data_tokens(data, 21, seed=2)
    return tokens if data % 2 else tokens[:, :1].repeat(1, 21, 1)


def _uneven(data: int) -> Tensor:
    """Ranks have different numbers of tokens."""
    return stock.data_tokens(data, (21, 5, 34, 1)[data % 4], seed=3)


_ROUTINGS = {"random": stock.data_tokens, "to one expert": _one_expert, "uneven batches": _uneven}
