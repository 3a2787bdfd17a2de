"""Losses that read a rank's shard of a weight, as a penalty over ``model.parameters()`` does: refused.

A shard over z is this rank's alone, and its gradient is taken for a sum over the ranks of z and divided by their number: that of a penalty would be
too small by it. Nothing but a layer's gather gives a shard a gradient otherwise, so the graph of a loss tells, where a host sees one; elsewhere
`axonn_tp.comm.shard_gradients` sees what comes of it. Of shards over x and y alone the gradient is right where the loss is a sum over elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from axonn_tp.comm.shard_gradients import read_in_shards
from axonn_tp.grid.layout import layout_of
from axonn_tp.layers.weight import Split, SplitWeight

_READS = {"_DeferredBackward", "_GatheredBackward", "OwnReadBackward"}
"""Layers' own reads of shards, and of what code makes of shards to give it to a layer."""
_OURS = {*_READS, "_GatherSummedBackward", "CompiledFunctionBackward"}
_CASTS = {"ToCopyBackward0"}
_OF_LAYERS = {"EmbeddingBackward0", "NativeGroupNormBackward0"}
"""Functions of torch's by which layers read shards over x and y, in losses of activations that shares add up to."""
# Operations by the names of their nodes in the graph.
_ADDED = {"Add", "Sub", "Rsub", "Neg", "ToCopy", "Clone", "Alias"}
_JOINED, _SHAPED = {"Stack", "Cat"}, {"Expand", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze"}
_MOVED = {"T", "Transpose", "Permute"}
_BY_ELEMENT = {"Pow", "Mul", "Div", "Reciprocal", "Abs", "Exp", "Log", "Log1P", "Sqrt", "Rsqrt", "Tanh", "Sigmoid"}
_BY_ELEMENT |= {"Relu", "Softplus", "Gelu", "Clamp", "ClampMin", "ClampMax", "Where", "Maximum", "Minimum"}
_SUMMED_LOSSES = {"MseLoss", "SmoothL1Loss", "HuberLoss"}
_NORM = "LinalgVectorNorm"


class OfExperts(ValueError):
    """A loss reads experts, of which a rank has some."""


class LossWatch:
    """Looks at the losses of a model, at fewer and fewer of them.

    Args:
        model: that `parallelize` has split.

    Attributes:
        summed: a weight of whose shard a loss has a sum, so that it is another number on other ranks; None: none has.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)
        self._seen = 0
        self.summed: str | None = None

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
        refuse_losses(model, losses)
        self.summed = self.summed or first_summed(losses, model)


def refuse_losses(model: nn.Module, losses: Iterable[Tensor]) -> None:
    """Look at what losses of a split model have gradients of that no gradient of a shard tells.

    Raises:
        ValueError: they read experts outside of their module, are other functions of shards over x and y than sums over elements, or count a
            rank's tokens.
    """
    name = first_read_in_shards(losses, model, experts=True)
    if name is not None:
        raise OfExperts(
            f"the loss reads {name} outside of the experts' module, and a rank has its own experts alone, so that the loss and its gradient would be "
            "others than in one process; have the optimizer decay weights, or leave experts out of the penalty"
        )
    name = first_not_summed(losses, model)
    if name is not None:
        raise ValueError(
            f"the loss reads {name} outside of its layer, where a rank has nothing but its shard over x and y, by more than a sum over elements, so "
            "that its gradient would be another than in one process; read layer.weight in the model's forward, which gives the whole, or have the "
            "optimizer decay weights"
        )
    if scales_by_frequency(losses, model):
        raise ValueError(
            "an embedding of the loss scales gradients by how often a token is in the batch (scale_grad_by_freq = True), and a rank counts those of its "
            "samples alone, not those of all readers; leave scale_grad_by_freq out"
        )


def first_read_in_shards(losses: Iterable[Tensor], model: nn.Module, experts: bool = False) -> str | None:
    """The first weight whose shard over z the losses read themselves; None where all go through the layers.

    Args:
        losses: that will be differentiated.
        model: the model.
        experts: look for this rank's experts in the place of shards.
    """
    shards: dict[Any, str] = {}
    for name, module in model.named_modules():
        apart = isinstance(module, Split) and module.lies_apart
        if (apart if experts else isinstance(module, SplitWeight)) and module.mesh.size("z") > 1:
            for own, parameter in module.named_parameters(recurse=experts):
                layout = layout_of(parameter)
                if layout.over_z or layout.home:
                    shards[parameter] = f"{name}.{own}" if name else own
    found: list[tuple[str, Any]] = []
    waiting = [loss.grad_fn for loss in losses if shards and loss.grad_fn is not None]
    seen: set[Any] = set(waiting)
    first, above = set(waiting), defaultdict[Any, list[Any]](list)
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
                    found.append((shards[variable], node))
            elif after is not None:
                above[after].append(node)
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
    order = list(shards.values())
    return min((name for name, node in found if _counts(node, first, above)), key=order.index, default=None)


def _counts(node: Any, first: set[Any], above: dict[Any, list[Any]]) -> bool:
    """True if a loss has a node's output other than times 0: of nodes above it alone saved numbers are read, which elsewhere may have to be recomputed."""
    waiting, seen = [node], {node}
    while waiting:
        node = waiting.pop()
        if _by_zero(node):
            continue
        if node in first:
            return True
        new = {each for each in above.get(node, ()) if each not in seen}
        seen |= new
        waiting += new
    return False


def _by_zero(node: Any) -> bool:
    """True if the loss has the node's inputs times 0, by which scripts have all parameters used."""
    # What hooks keep is left alone: an activation checkpoint would compute its block again, on ranks of experts in another order each.
    if node.name() != "MulBackward0" or getattr(node._raw_saved_other, "unpack_hook", None) is not None:
        return False
    factor = node._saved_other
    if not isinstance(factor, Tensor) or factor.dim() or factor.device.type != "cpu":
        return False
    with _disable_current_modes():  # which are given a number of Python's for it
        return not factor.any()


def first_not_summed(losses: Iterable[Tensor], model: nn.Module) -> str | None:
    """The first parameter of whose shards over x and y the losses are another function than a sum over elements, and no layer's.

    Such a sum (of squares, of magnitudes) has the whole one's gradient; a norm, a mean or a product of matrices has not.
    """
    return next((name for name, sums in _read_outside(losses, model) if not sums), None)


def first_summed(losses: Iterable[Tensor], model: nn.Module) -> str | None:
    """The first parameter of whose shards over x and y the losses have a sum of their own, a part of the whole one's."""
    return next((name for name, sums in _read_outside(losses, model) if sums), None)


def _read_outside(losses: Iterable[Tensor], model: nn.Module) -> list[tuple[str, bool]]:
    """Parameters of whose shards over x and y the losses are functions beside their layers, and whether these are sums over elements."""
    shards: dict[Any, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, SplitWeight) and module.gathers.options.compile:
            return []  # traced collectives are no functions of ours
        if isinstance(module, Split):
            for own, parameter in module.named_parameters(recurse=False):
                layout = module.layouts.get(own)
                if layout and any((layout.grid or module.mesh.grid).size(axis) > 1 for _, axis in layout.split):
                    shards[parameter] = f"{name}.{own}" if name else own
    found: set[tuple[str, bool]] = set()
    waiting: list[tuple[Any, str]] = [(loss.grad_fn, "sum") for loss in losses if shards and loss.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node, use = waiting.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            if variable in shards:
                found.add((shards[variable], use in ("sum", "element", "pair")))
        elif node.name() not in _OURS | _OF_LAYERS and not (_of_the_suite(node) or _by_zero(node)):
            after = _use_below(node, use)
            new = {(each, after) for each, _ in node.next_functions if each is not None} - seen
            seen |= new
            waiting += new
    order = [*shards.values()]
    return sorted(found, key=lambda each: order.index(each[0]))


def scales_by_frequency(losses: Iterable[Tensor], model: nn.Module) -> bool:
    """True if the losses read rows of a table whose gradients are divided by counts of tokens, of which other ranks have others."""
    meshes = [module.mesh for module in model.modules() if isinstance(module, Split)]
    if all(mesh.grid.batch == 1 for mesh in meshes):
        return False
    waiting = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    seen: set[Any] = set(waiting)
    while waiting:
        node = waiting.pop()
        if getattr(node, "_saved_scale_grad_by_freq", False):
            return True
        new = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= new
        waiting += new
    return False


def _of_the_suite(node: Any) -> bool:
    made_by = getattr(getattr(type(node), "_forward_cls", None), "__module__", "")
    return made_by.partition(".")[0] in ("axonn_tp", "axonn_plugins", "ted_moe")


def _use_below(node: Any, use: str) -> str:
    """Dependence of the loss on the inputs of a node, by that on its output.

    "sum" is linearly, "mean" linearly by factors that may depend on the number of elements, "element" by a sum of a function of each element, "pair" by
    one that takes elements of several tensors of this shape, and "power 2" by a sum of squares of the output; all else is "other".
    """
    name = node.name().partition("Backward")[0]
    inputs = [each for each, _ in node.next_functions]
    scaled = inputs.count(None) == len(inputs) - 1 and (name == "Mul" or (name == "Div" and inputs[0] is not None))
    if use in ("sum", "mean") and (scaled or name in _ADDED | _JOINED | _SHAPED | _MOVED):
        return use
    if use in ("sum", "mean") and name in ("Sum", "Mean"):
        return "sum" if (use, name) == ("sum", "Sum") or node.name() == "SumBackward0" else "mean"
    if use in ("sum", "mean") and (name == "Dot" or (name in _SUMMED_LOSSES and node._saved_reduction == 2)):
        return "element"
    if name == _NORM:
        return (
            "element"
            if use == f"power {node._saved_ord}" or (node._saved_ord == 1 and _adds_up(node, use))
            else "other"
        )
    if name == "Pow" and inputs[0] is not None and inputs[0].name().startswith(_NORM) and _adds_up(inputs[0], use):
        return f"power {node._saved_exponent}"
    if use == "element" and name in _JOINED | _SHAPED:
        return use
    by_element = name in _BY_ELEMENT or (use != "sum" and name in _ADDED)
    if use not in ("sum", "element", "pair") or not by_element:
        return "other"
    return "pair" if use == "pair" or inputs.count(None) < len(inputs) - 1 else "element"


def _adds_up(norm: Any, use: str) -> bool:
    """True if a loss that depends so on a power of the norm depends so on the sum over all that the norm is taken of."""
    return use == "sum" or (use == "mean" and norm._saved_dim is None)
