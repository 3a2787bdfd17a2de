"""Experts in place of MLPs: how an average layer's parameters lie, and what its all-to-alls take.

There are two kinds of mixture:

- TED's, `Setting.experts` (000, chapter 7): every second layer of a base model, whose MLP is repeated; every token goes to one expert;
- a model's own (`Transformer.experts`), with experts of another size, several for each token, shared ones and a router.

Experts are shared out among data-parallel ranks, as many as the number of experts and nd have as a common divisor; the other factor of nd
repeats each expert. Tokens go through an all-to-all before and after their experts, once for each, of which duplicate token dropping
leaves each rank of n1 a share. As many go to each expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from axonn_plugins.config.base import ConfigError
from axonn_plugins.planner.collectives import Kind, seconds
from axonn_plugins.planner.machine import Machine
from axonn_plugins.planner.model import Transformer
from axonn_plugins.planner.transformer import (
    Local,
    Mode,
    Operation,
    Strategy,
    expert_parameters,
    mlp_parameters,
    operations,
    parameters,
)
from axonn_plugins.planner.work import Number

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Mixture:
    """Experts of a model in training.

    Attributes:
        sparse: share of the layers that have them.
        experts: of such a layer.
        per_token: to which each position goes.
    """

    sparse: float
    experts: int
    per_token: int


@dataclass(frozen=True)
class Share:
    """Parameters of an average layer on one GPU, and who holds the same.

    Attributes:
        shared: parameters outside experts.
        replicas: (ranks that hold the same of these, of which so many share a domain).
        expert: parameters in experts; 0 without.
        expert_replicas: likewise of experts.
        exchange: (expert-parallel ranks, of which so many share a domain).
        mixture: which experts; None without.
    """

    shared: Number
    replicas: tuple[Integers, Integers]
    expert: Number
    expert_replicas: tuple[Integers, Integers]
    exchange: tuple[Integers, Integers]
    mixture: Mixture | None = None


def mixture(model: Transformer, experts: int) -> Mixture | None:
    """The model's own, or TED's of so many experts; None without either.

    Raises:
        ConfigError: there are both.
    """
    if model.experts and experts:
        raise ConfigError(
            f'model "{model.name}" has {model.experts} experts, so that experts = {experts} cannot be put in every second layer; give one'
        )
    if model.experts:
        return Mixture(model.sparse_layers / model.layers, model.experts, model.experts_per_token)
    return Mixture((model.layers // 2) / model.layers, experts, 1) if experts else None


def expert_ranks(experts: int, ranks: Integers) -> Integers:
    """Number of data-parallel ranks, of those that there are, among which experts are shared out."""
    return np.gcd(ranks, experts)


def layers(
    model: Transformer,
    strategy: Strategy,
    mode: Mode,
    size: Local,
    vector_cost: float,
    ranks: Integers,
    causal: bool = False,
) -> list[tuple[float, list[Operation]]]:
    """The model's kinds of layers, each with its share of all layers.

    Args:
        model: what is trained.
        strategy: of tensor parallelism.
        mode: see `transformer.local`.
        size: sizes on one GPU.
        vector_cost: see `transformer.operations`.
        ranks: data-parallel ranks, nd, which share out experts.
        causal: see `work.attention`.
    """
    routed = model.experts / expert_ranks(model.experts, ranks) if model.experts else None
    found = []
    for kind, count in model.counts.items():
        of_kind = routed if "E" in kind else None
        several = operations(model, strategy, mode, size, vector_cost, causal, of_kind, kind)
        found.append((count / model.layers, several))
    return found


def share(
    model: Transformer,
    strategy: Strategy,
    size: Local,
    data: tuple[Integers, Integers],
    replicas: tuple[Integers, Integers],
    experts: int,
) -> Share:
    """The parameters of an average layer that a GPU holds, and its part of their states.

    Args:
        model: what is trained.
        strategy: of tensor parallelism.
        size: sizes on one GPU.
        data: nd, and how many of these share a domain.
        replicas: ranks that hold the same weights of the base model, and how many share a domain.
        experts: TED's, of every second layer; 0 for none.
    """
    whole, mixed = parameters(model, strategy, size), mixture(model, experts)
    if mixed is None:
        nobody = np.ones_like(data[0])
        return Share(whole, replicas, 0 * whole, (nobody, nobody), (nobody, nobody))
    ranks = expert_ranks(mixed.experts, data[0])
    near = np.gcd(data[1], ranks)
    mlp = mixed.sparse * mlp_parameters(model, strategy, size)
    each, beside = mlp, 0 * mlp
    if model.experts:
        each, beside = (mixed.sparse * one for one in expert_parameters(model, strategy, size))
    repeated = (replicas[0] // ranks, replicas[1] // near)
    return Share(whole - mlp + beside, replicas, each * mixed.experts / ranks, repeated, (ranks, near), mixed)


def exchange_seconds(
    machine: Machine, model: Transformer, strategy: Strategy, size: Local, lies: Share, dropping: bool = True
) -> Number:
    """Both all-to-alls of an average layer and microbatch; backward has as many. Nothing without experts.

    Args:
        machine: the networks.
        model: what is trained.
        strategy: of tensor parallelism.
        size: sizes on one GPU.
        lies: how experts lie.
        dropping: duplicates are dropped; else each rank of n1 sends all tokens.
    """
    if lies.mixture is None:
        return 0.0
    sent = _tokens_bytes(model, strategy, size, dropping, lies.mixture.per_token)
    return 2 * lies.mixture.sparse * seconds(machine, Kind.GATHER, sent, *lies.exchange)


def exchanged_bytes(model: Transformer, strategy: Strategy, size: Local, experts: int, dropping: bool) -> Number:
    """Bytes that both all-to-alls of an average layer give a GPU."""
    mixed = mixture(model, experts)
    if mixed is None:
        return 0.0
    return 2 * mixed.sparse * _tokens_bytes(model, strategy, size, dropping, mixed.per_token)


def _tokens_bytes(model: Transformer, strategy: Strategy, size: Local, dropping: bool, each: int) -> Number:
    width = model.hidden / size.n1 if strategy == "summa" else model.hidden
    return 2 * each * (size.own_rows if dropping else size.rows) * width
