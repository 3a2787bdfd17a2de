"""Scores besides magnitude, of which the smallest are pruned: drawn at random, or of the first gradients (SNIP, GraSP)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samo.pruning import chosen, require_scope, select
from samo.selection import Shard, Shards
from samo.stacks import stacks_of
from samo.targets import Parameters, require_values

Loss = Callable[[nn.Module, Any], Tensor]
"""The mean loss of a model on a batch."""


def by_scores(
    parameters: Mapping[str, Tensor],
    scores: Mapping[str, Tensor],
    sparsity: float,
    scope: str = "layer",
    shards: Shards | None = None,
    stacks: Collection[Tensor] = (),
) -> dict[str, Tensor]:
    """Masks without the smallest scores; of equal ones the first go, as of `samo.magnitude`'s.

    Args:
        parameters: by name.
        scores: of the same names and shapes, of any sign.
        sparsity: see `samo.magnitude`, as for those that follow.
        scope: see there.
        shards: see there.
        stacks: see there.

    Raises:
        ValueError: see there.
    """
    require_scope(sparsity, scope)
    return select(parameters, scores, sparsity, scope, shards, stacks)


def random(
    model: Parameters,
    sparsity: float,
    scope: str = "layer",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    *,
    seed: int = 0,
    shards: Shards | None = None,
    stacks: Collection[Tensor] | None = None,
) -> dict[str, Tensor]:
    """Prune weights drawn at random, the same on any number of ranks; with a higher sparsity those of a lower one, and more.

    Args:
        model: see `samo.magnitude`, as for all but the seed.
        sparsity: see there.
        scope: see there.
        include: see there.
        exclude: see there.
        seed: of the draw, with each parameter's name.
        shards: see there.
        stacks: see there.

    Raises:
        ValueError: see there.
    """
    parameters = chosen(model, include, exclude, shards)
    scores = random_scores(parameters, seed, shards)
    return by_scores(
        parameters, scores, sparsity, scope, shards, stacks_of(model, shards) if stacks is None else stacks
    )


def random_scores(parameters: Mapping[str, Tensor], seed: int, shards: Shards | None = None) -> dict[str, Tensor]:
    """Uniform in [0, 1), by the seed, a parameter's name and the position in it."""
    scores = {}
    for name, parameter in parameters.items():
        shard = Shard(tuple(parameter.shape)) if shards is None else shards.find(name, parameter)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        scores[name] = shard.part_of(torch.rand(shard.shape, generator=generator).to(parameter.device))
    return scores


def snip(
    model: nn.Module,
    loss_of: Loss,
    batches: Iterable[Any],
    sparsity: float,
    scope: str = "layer",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    *,
    shards: Shards | None = None,
) -> dict[str, Tensor]:
    """Prune what changes the loss least: the smallest |w · ∂L/∂w| (SNIP; Lee et al., arXiv 1810.02340, equation 5).

    Args:
        model: before it is trained, and without an optimizer of SAMO's.
        loss_of: the mean loss of the model on a batch; with shards, on this rank's part of it.
        batches: whose mean loss is differentiated.
        sparsity: see `samo.magnitude`, as for those that follow. The paper's scope is "global".
        scope: see there.
        include: see there.
        exclude: see there.
        shards: see there; gradients are averaged over the ranks.

    Raises:
        ValueError: see there; there is no batch, or no gradient.
    """
    parameters = _trained(model, include, exclude, shards)
    every = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in every]
    for parameter in every:
        parameter.grad = None
    for batch in _some(batches):
        loss_of(model, batch).backward()
    if shards is not None and shards.average is not None:
        shards.average(every)
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    empty = all(parameter.grad is None for parameter in every)
    for parameter, gradient in zip(every, before, strict=True):
        parameter.grad = gradient
    if empty:
        raise ValueError(
            "samo.snip finds no gradient in any parameter; call it before samo.Optimizer is made, which takes gradients away, with a loss of the model's"
        )
    scores = {name: sensitivity(parameter, gradients[name]) for name, parameter in parameters.items()}
    return by_scores(parameters, scores, sparsity, scope, shards, stacks_of(model, shards))


def sensitivity(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """|w · g|, zeros without a gradient."""
    return torch.zeros_like(parameter.detach()) if gradient is None else (parameter.detach() * gradient).abs()


def grasp(
    model: nn.Module,
    loss_of: Loss,
    batches: Iterable[Any],
    sparsity: float,
    scope: str = "layer",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """Keep what the gradient's flow needs: pruned are the smallest w · Hg (GraSP; Wang et al., arXiv 2002.07376, equation 8).

    H is the Hessian and g the gradient of the mean loss of the batches, which are differentiated twice: so the model is to be a whole
    one, before it is split, and its operations differentiable twice. Masks can be written and read (`samo.write_masks`).

    Args:
        model: before it is trained.
        loss_of: the mean loss of the model on a batch.
        batches: gone through twice.
        sparsity: see `samo.magnitude`, as for those that follow.
        scope: see there.
        include: see there.
        exclude: see there.

    Raises:
        ValueError: see there; there is no batch.
    """
    parameters = _trained(model, include, exclude, None)
    weights, every = list(parameters.values()), _some(batches)
    total = [torch.zeros_like(weight) for weight in weights]
    for batch in every:
        found = torch.autograd.grad(loss_of(model, batch), weights, allow_unused=True)
        total = [sum_ if one is None else sum_ + one for sum_, one in zip(total, found, strict=True)]
    products = [torch.zeros_like(weight) for weight in weights]
    for batch in every:
        found = torch.autograd.grad(loss_of(model, batch), weights, create_graph=True, allow_unused=True)
        flow = sum(
            ((one * of_all).sum() for one, of_all in zip(found, total, strict=True) if one is not None),
            weights[0].new_zeros(()),
        )
        second = torch.autograd.grad(flow, weights, allow_unused=True) if flow.requires_grad else [None] * len(weights)
        products = [product if one is None else product + one for product, one in zip(products, second, strict=True)]
    scores = {
        name: (weight * product).detach() for (name, weight), product in zip(parameters.items(), products, strict=True)
    }
    return by_scores(parameters, scores, sparsity, scope, None, stacks_of(model))


def _trained(model: nn.Module, include: Any, exclude: Any, shards: Shards | None) -> dict[str, Tensor]:
    parameters = chosen(model, include, exclude, shards)
    require_values(parameters)
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        raise ValueError(
            f"{frozen[0]!r} is frozen and has no gradient to be judged by; exclude it, or set requires_grad"
        )
    return parameters


def _some(batches: Iterable[Any]) -> list[Any]:
    found = list(batches)
    if not found:
        raise ValueError("there is no batch to take gradients of; give one or more")
    return found
