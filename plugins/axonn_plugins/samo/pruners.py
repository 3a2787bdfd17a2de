"""The block's pruners that look at a model once: masks of what it holds, of first gradients or drawn."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

import samo
from axonn_plugins.config.samo import Heads, Samo
from axonn_plugins.samo.gradients import FirstGradients
from samo.patterns import input_dims
from samo.reparametrised import nonzero
from samo.scores import by_scores
from samo.stacks import stacks_of
from samo.structures import of_heads


def masks_by(
    block: Samo,
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    shards: samo.Shards,
    sparsity: float | None,
    gradients: FirstGradients | None,
) -> dict[str, Tensor]:
    """This rank's parts of the masks; every rank calls it.

    Args:
        block: says which pruner.
        model: this rank's part.
        parameters: of it, what is to be pruned, by name.
        shards: how it lies on the ranks.
        sparsity: as far as it has grown; None: the pruner says so itself.
        gradients: of the first batches, for a pruner that goes by them.

    Raises:
        ValueError: the model cannot be pruned so.
    """
    chosen, scope, inputs = parameters.items(), block.scope, input_dims(model, shards)
    if block.n_of_m is not None:
        n, m = block.n_of_m
        return samo.n_of_m(chosen, n, m, shards=shards, inputs=inputs)
    if block.pruner == "nonzero":
        return nonzero(parameters, shards)
    assert sparsity is not None
    if isinstance(block.structure, Heads):
        return of_heads(parameters, sparsity, block.structure.heads, block.structure.columns, shards, inputs)
    if block.structure is not None:
        return samo.channels(chosen, sparsity, shards=shards, inputs=inputs)
    stacks = stacks_of(model, shards)
    if block.random is not None:
        return samo.random(chosen, sparsity, scope, seed=block.random.seed, shards=shards, stacks=stacks)
    if gradients is not None:
        return by_scores(parameters, gradients.scores(), sparsity, scope, shards, stacks)
    return samo.magnitude(chosen, sparsity, scope, shards=shards, stacks=stacks)
