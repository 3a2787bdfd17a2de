"""A mixture of experts in place of every second layer's MLP, split as TED does (000, chapter 7): what changes in a layer, on average.

Experts are shared out among data-parallel ranks, as many as the number of experts and nd have as a common divisor; the other factor of nd
repeats each expert. Every token goes to one expert, through an all-to-all before and after it, of which duplicate token dropping
leaves each rank of n1 a share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from axonn_plugins.planner.collectives import Kind, seconds
from axonn_plugins.planner.machine import Machine
from axonn_plugins.planner.model import Transformer
from axonn_plugins.planner.transformer import Local, Strategy, mlp_parameters, parameters
from axonn_plugins.planner.work import Number

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """Parameters of an average layer on one GPU, and who holds the same.

    Attributes:
        shared: parameters outside experts.
        replicas: (ranks that hold the same of these, of which so many share a domain).
        expert: parameters in experts; 0 without.
        expert_replicas: likewise of experts.
        exchange: (expert-parallel ranks, of which so many share a domain).
    """

    shared: Number
    replicas: tuple[Integers, Integers]
    expert: Number
    expert_replicas: tuple[Integers, Integers]
    exchange: tuple[Integers, Integers]


def share(
    model: Transformer,
    strategy: Strategy,
    size: Local,
    data: tuple[Integers, Integers],
    replicas: tuple[Integers, Integers],
    experts: int,
) -> Share:
    """How an average layer's parameters lie.

    Args:
        model: the base model.
        strategy: of tensor parallelism.
        size: sizes on one GPU.
        data: nd, and how many of these share a domain.
        replicas: ranks that hold the same weights of the base model, and how many share a domain.
        experts: of every second layer; 0 for none.
    """
    whole = parameters(model, strategy, size)
    if not experts:
        nobody = np.ones_like(data[0])
        return Share(whole, replicas, 0 * whole, (nobody, nobody), (nobody, nobody))
    sparse = (model.layers // 2) / model.layers
    ranks = np.gcd(data[0], experts)
    near = np.gcd(data[1], ranks)
    mlp = sparse * mlp_parameters(model, strategy, size)
    repeated = (replicas[0] // ranks, replicas[1] // near)
    return Share(whole - mlp, replicas, mlp * experts / ranks, repeated, (ranks, near))


def exchange_seconds(
    machine: Machine, model: Transformer, strategy: Strategy, size: Local, lies: Share, dropping: bool = True
) -> Number:
    """Both all-to-alls of an average layer and microbatch; backward has as many.

    Args:
        machine: the networks.
        model: the base model.
        strategy: of tensor parallelism.
        size: sizes on one GPU.
        lies: how experts lie.
        dropping: duplicates are dropped; else each rank of n1 sends all tokens.
    """
    sparse = (model.layers // 2) / model.layers
    return 2 * sparse * seconds(machine, Kind.GATHER, _tokens_bytes(model, strategy, size, dropping), *lies.exchange)


def exchanged_bytes(model: Transformer, strategy: Strategy, size: Local, experts: int, dropping: bool) -> Number:
    """Bytes that both all-to-alls of an average layer give a GPU."""
    sparse = (model.layers // 2) / model.layers if experts else 0.0
    return 2 * sparse * _tokens_bytes(model, strategy, size, dropping)


def _tokens_bytes(model: Transformer, strategy: Strategy, size: Local, dropping: bool) -> Number:
    width = model.hidden / size.n1 if strategy == "summa" else model.hidden
    return 2 * (size.own_rows if dropping else size.rows) * width
