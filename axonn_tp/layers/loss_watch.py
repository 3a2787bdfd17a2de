"""Losses that read a rank's shard of a weight, as a penalty over ``model.parameters()`` does: refused.

A shard over z is this rank's alone, and its gradient is taken for a sum over the ranks of z and divided by their number: that of a penalty would be
too small by it. Nothing but a layer's gather gives a shard a gradient otherwise, so the graph of a loss tells, where a host sees one; elsewhere
`axonn_tp.comm.shard_gradients` sees what comes of it. Of a shard over x or y alone the gradient of a sum over elements is right, and that of a norm or
a mean is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

from torch import Tensor, nn

from axonn_tp.comm.shard_gradients import read_in_shards
from axonn_tp.layers.weight import Split, SplitWeight

_READS = {"_DeferredBackward", "_GatheredBackward", "OwnReadBackward"}
"""Layers' own reads of shards, and of what code makes of shards to give it to a layer."""
_OURS = {*_READS, "_GatherSummedBackward", "CompiledFunctionBackward"}
_CASTS = {"ToCopyBackward0"}
_JOINS = {f"{name}Backward0" for name in ("Stack", "Cat", "Unsqueeze", "View")}
_LINEAR = {*_CASTS, *_JOINS, *(f"{name}Backward0" for name in ("Add", "Sub", "Neg", "Mul", "Div", "Squeeze"))}
"""Functions behind which a sum of terms is still one."""
_SUMS = {"SumBackward0", "DotBackward0"}
_EACH = {
    *(f"{name}Backward0" for name in ("Add", "Sub", "Neg", "Mul", "Div", "Pow", "Abs", "Sqrt", "Exp", "Log", "Clone")),
    *(f"{name}Backward0" for name in ("ToCopy", "View", "UnsafeView", "Relu", "Sigmoid", "Tanh", "Sgn", "Where")),
    *(f"Clamp{kind}Backward{number}" for kind in ("", "Min", "Max") for number in (0, 1)),
}
"""Functions that make an element of one element."""
_MIXES = {
    *(
        f"{name}Backward0"
        for name in ("Norm", "LinalgVectorNorm", "LinalgSvd", "Mean", "Var", "Std", "Amax", "Logsumexp")
    ),
    *(
        f"{name}Backward0"
        for name in ("Mm", "Bmm", "T", "Transpose", "Permute", "Expand", "Select", "Slice", "Diagonal")
    ),
    *("MeanBackward1", "SumBackward1"),
}
"""Other functions of penalties on weights. What a split model gives is not of these alone: a function of a layer, a collective, is below it."""


class LossWatch:
    """Looks at the losses of a model, at fewer and fewer of them.

    Args:
        model: that `parallelize` has split.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)
        self._seen = 0

    def look(self, *losses: Tensor) -> None:
        """Before backward.

        Raises:
            ValueError: a weight is read in shards; the same on all ranks whose losses are made in the same way.
        """
        self._seen += 1
        model = self._model()
        if model is None or self._seen & (self._seen - 1):
            return
        name = first_read_in_shards(losses, model)
        if name is not None:
            raise ValueError(read_in_shards(name))
        name = first_mixed_shard(losses, model)
        if name is not None:
            raise ValueError(
                f"the loss reads a norm, a mean or a product of {name} outside of its layer, where a rank has nothing but its shard over x and y, so that the "
                "gradient would be another than in one process; add up squares or magnitudes by .sum(), read layer.weight in the model's forward, which "
                "gives the whole, or have the optimizer decay weights"
            )


def first_read_in_shards(losses: Iterable[Tensor], model: nn.Module) -> str | None:
    """The first weight whose shard over z the losses read themselves; None where all go through the layers."""
    shards: dict[Any, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, SplitWeight) and module.mesh.size("z") > 1:
            for own, parameter in module.named_parameters(recurse=False):
                if module.layouts[own].over_z:
                    shards[parameter] = f"{name}.{own}" if name else own
    found: list[str] = []
    waiting = [loss.grad_fn for loss in losses if shards and loss.grad_fn is not None]
    seen: set[Any] = set(waiting)
    while waiting:
        node = waiting.pop()
        own = node.name()
        if own in _READS:
            continue
        for after, _ in node.next_functions:
            while after is not None and own not in _OURS and after.name() in _CASTS:
                after = after.next_functions[0][0]
            variable = getattr(after, "variable", None)
            if variable is not None:
                if own not in _OURS and variable in shards:
                    found.append(shards[variable])
            elif after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
    order = list(shards.values())
    return min(found, key=order.index, default=None)


def first_mixed_shard(losses: Iterable[Tensor], model: nn.Module) -> str | None:
    """The first parameter split over x or y alone of which a term of the losses makes, past all layers, something else than a sum over elements."""
    shards: dict[Any, str] = {}
    for prefix, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False) if isinstance(module, Split) else ():
            if own in module.layouts and any(module.mesh.size(axis) > 1 for _, axis in module.layouts[own].split):
                shards[parameter] = f"{prefix}.{own}" if prefix else own
    for term in _terms(loss.grad_fn for loss in losses if shards):
        nodes = list(_below(term))
        read = [shards[leaf] for node in nodes if (leaf := getattr(node, "variable", None)) in shards]
        inner = {node.name() for node in nodes if node is not term and not hasattr(node, "variable")}
        sums = term.name() in _SUMS or getattr(term, "_saved_ord", None) == 1
        of_weights = (_EACH | _MIXES | _SUMS | _JOINS).issuperset({*inner, term.name()})
        if read and of_weights and not (sums and inner <= _EACH):
            return read[0]
    return None


def _terms(roots: Iterable[Any]) -> Iterator[Any]:
    """The nodes of which losses are the sums, each with its factor."""
    waiting = [root for root in roots if root is not None]
    seen: set[Any] = set(waiting)
    while waiting:
        node = waiting.pop()
        after = [one for one, _ in node.next_functions if one is not None]
        of_terms = node.name() == "SumBackward0" and all(one.name() in _JOINS for one in after)
        if not of_terms and node.name() not in _LINEAR:
            yield node
            continue
        for one in after:
            if one not in seen:
                seen.add(one)
                waiting.append(one)


def _below(root: Any) -> Iterator[Any]:
    """A node and all that it is made of."""
    waiting = [root]
    seen: set[Any] = set(waiting)
    while waiting:
        yield (node := waiting.pop())
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
