"""Decide what every layer of a model becomes: module names and shapes in, placements or an error out; touches nothing."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from axonn_tp.grid.mesh import Grid
from axonn_tp.layers.conv import check_conv, is_conv
from axonn_tp.layers.cross_entropy import CrossEntropyLoss, check_loss
from axonn_tp.layers.embedding import check_embedding
from axonn_tp.layers.group_norm import check_group_norm
from axonn_tp.layers.layer_norm import check_norm
from axonn_tp.layers.linear_split import LinearSplit, features
from axonn_tp.layers.rms_norm import check_rms_norm, is_rms_norm
from axonn_tp.layers.weight import Split
from axonn_tp.options import Options
from axonn_tp.plan.adapters import refuse_adapters
from axonn_tp.plan.counted_attributes import check_counts
from axonn_tp.plan.own_forward import refuse_own_forward, refuse_own_statistics
from axonn_tp.plan.resharding import decide
from axonn_tp.plan.rules import KINDS, LayerPlan, Placement, Plan, linear_split
from axonn_tp.plan.tables import refuse_tables

_CLASSES: dict[str, tuple[type[nn.Module], ...]] = {
    "normal": (nn.Linear, _ConvNd),
    "transposed": (nn.Linear, _ConvNd),
    "head": (nn.Linear,),
    "self_contained": (nn.Linear, _ConvNd),
    "embedding": (nn.Embedding,),
    "norm": (nn.LayerNorm, nn.RMSNorm),
    "group_norm": (nn.GroupNorm,),
    "loss": (nn.CrossEntropyLoss,),
    "replicated": (nn.Module,),
}


def _is_linear(module: nn.Module) -> bool:
    """A linear whose weight is its own parameter and whose forward is torch's, so that replacing it changes nothing."""
    return features(module) is not None and module._parameters.keys() >= {"weight", "bias"}


def refuse_unmade(model: nn.Module) -> None:
    """Refuse lazy layers that no input has given a size yet.

    Raises:
        ValueError: names the first.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"{name} has no size yet, as those of torch's lazy layers before their first input; call the model once on an example before it is split"
            )


def kept_whole(model: nn.Module) -> set[int]:
    """Modules in nn.MultiheadAttention, which reads its projections' weights and never calls them, or where ``axonn_whole`` is true.

    So it is of modules that one rank calls alone.
    """
    return {
        id(child)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention) or getattr(module, "axonn_whole", False)
        for child in module.modules()
    }


def free_layers(model: nn.Module) -> set[str]:
    """Names of the linears and convolutions that can be split by themselves: nobody else shares their parameters, which are real."""
    holders = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    whole = kept_whole(model)
    return {
        name
        for name, module in model.named_modules()
        if (_is_linear(module) or is_conv(module))
        and id(module) not in whole
        and all(holders[id(p)] == 1 and not p.is_complex() for p in module._parameters.values() if p is not None)
    }


def _named_plan(model: nn.Module, plan: Plan) -> dict[str, LayerPlan]:
    """The plan by module name, the first of several names of one module. The first pattern that matches a module wins.

    Raises:
        ValueError: a pattern matches nothing, or a module of the wrong class.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    first = {id(module): name for name, module in model.named_modules()}
    named: dict[str, LayerPlan] = {}
    for pattern, given in plan.items():
        layer = LayerPlan.of(pattern, given)
        if layer.kind not in KINDS:
            raise ValueError(f"plan {pattern!r}: {layer.kind!r} is not a kind; choose one of {', '.join(KINDS)}")
        matches = [name for name in modules if name and fnmatchcase(name, pattern)]
        if not matches:
            near = difflib.get_close_matches(
                pattern.replace("*", "0"), [name for name in modules if name], n=1, cutoff=0.0
            )
            raise ValueError(
                f"plan {pattern!r} matches no layer of {type(model).__name__}; the nearest name is {near[0] if near else 'none'!r}"
            )
        for name in matches:
            other = layer.kind == "norm" and is_rms_norm(modules[name])
            other = other or (nn.Linear in _CLASSES[layer.kind] and features(modules[name]) is not None)
            if not other and not isinstance(modules[name], _CLASSES[layer.kind]):
                takes = " or ".join("convolution" if c is _ConvNd else c.__name__ for c in _CLASSES[layer.kind])
                raise ValueError(
                    f"plan {pattern!r}: layer {name} is a {type(modules[name]).__name__}, and {layer.kind} takes "
                    f"a {takes}; narrow the pattern"
                )
            named.setdefault(first[id(modules[name])], layer)
    return named


# Kind of layer: the kind that goes before it, what that makes, and what to do.
_NEEDS = {
    "norm": (
        "embedding",
        "features split over y, which an embedding layer starts; name the embedding, or leave norms out",
    ),
    "group_norm": (
        "normal",
        "channels split over x, which a normal layer before it makes; name that layer, or leave group norms out",
    ),
    "loss": ("head", "logits split over x, which a head layer makes; name the head, or leave the loss out"),
}


def _check_together(kinds: Set[str]) -> None:
    for kind, (before, what) in _NEEDS.items():
        if kind in kinds and before not in kinds:
            raise ValueError(f"plan: {kind} needs {what}")


def place(model: nn.Module, grid: Grid, plan: Plan | None = None, options: Options | None = None) -> list[Placement]:
    """Decide what every layer becomes; touches nothing.

    Args:
        model: the serial model, on any device including meta.
        grid: the grid.
        plan: by name pattern (``*`` matches anything) what a layer becomes, in any form of `LayerPlan.of`; linears and
            convolutions it does not name become self-contained.
        options: of these the layout decides how activations travel.

    Returns:
        Placements of all modules that change, in the order of `named_modules`.

    Raises:
        ValueError: names the layer or the pattern, what is wrong and what to do.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            "parameters are DTensors already, as fully_shard and parallelize_module make them, and cannot be split again; leave those out: z is the "
            "counterpart of the first, x of the second"
        )
    refuse_unmade(model)
    refuse_adapters(model, grid)
    refuse_tables(model, grid)
    named, options = _named_plan(model, plan or {}), options or Options()
    refuse_own_statistics(model, grid, options.sync_batch_norm)
    kinds = {layer.kind for layer in named.values()}
    stream_split = "embedding" in kinds
    _check_together(kinds)
    free = free_layers(model)
    modules = dict(model.named_modules())
    scatter_tokens = stream_split and options.scattered and not any(layer.whole_tokens for layer in named.values())
    heads = {id(m.weight) for name, m in modules.items() if name in named and named[name].kind == "head"}
    scattering = _scattering(model, named, grid) if options.scattered else {}
    reading = readers(model, named)
    placements = []
    for name, module in model.named_modules():
        if isinstance(module, (Split, CrossEntropyLoss)):
            _check_present(module, grid, name)
            continue
        layer = named.get(name)
        if layer is None:
            if name not in free:
                continue
            layer = LayerPlan("self_contained")
        if layer.kind == "replicated":
            continue
        if is_parametrized(module):
            raise ValueError(
                f"layer {name}: its weight or bias is made of other parameters by torch.nn.utils.parametrize, and cannot be split; name the layer "
                "replicated in the plan, or leave it out"
            )
        if any(parameter.is_complex() for parameter in module.parameters(recurse=False)):
            what = "complex weights are not split; name the layer replicated in the plan, or leave it out"
            raise ValueError(f"layer {name}: {what}")
        refuse_own_forward(module, name)
        split = None
        scatter = scattering.get(name, False)
        if nn.Linear in _CLASSES[layer.kind]:
            size = features(module)
            split = linear_split(layer, stream_split, scatter_tokens, "loss" in kinds, scatter)
            if isinstance(module, _ConvNd):
                check_conv(module, split, grid, name)
                if "tokens" in (split.takes, split.gives) and grid.gx > 1:
                    raise ValueError(
                        f"layer {name}: a convolution looks across tokens, which the scattered layout splits over gx = {grid.gx}; give the "
                        'embedding "whole_tokens": true in the plan, or use layout = "replicated"'
                    )
            else:
                split.check(*Placement(name, module, layer.kind)._size(), grid, name)
            shares = math.prod(grid.size(axis) for axis in split.split_over)
            check_counts(modules[name.rpartition(".")[0]], layer.counts, shares, name, size[0] if size else 0)
        elif layer.kind == "embedding":
            check_embedding(module, grid, name)  # type: ignore[arg-type]
        elif layer.kind == "norm":
            check = check_norm if isinstance(module, nn.LayerNorm) else check_rms_norm
            check(module, grid, name)  # type: ignore[arg-type]
        elif layer.kind == "group_norm":
            check_group_norm(module, grid, ("x", "y") if scatter else ("x",), name)  # type: ignore[arg-type]
        elif layer.kind == "loss":
            check_loss(module, _head_sizes(model, named), name)  # type: ignore[arg-type]
        sizes = _head_sizes(model, named) if layer.kind == "loss" else set()
        classes = min(sizes) if len(sizes) == 1 else None
        tied = layer.kind == "embedding" and id(module.weight) in heads
        placed = Placement(name, module, layer.kind, split, options, scatter_tokens, classes, tied, scatter)
        placements.append(replace(placed, counts=layer.counts, readers=reading.get(name, ())))
    _check_shared(placements, model)
    decide(placements, grid)
    return placements


def at_times(model: nn.Module, plan: Plan | None) -> Iterator[nn.Module]:
    """Layers that a plan keeps whole because some ranks may not call them, and what they hold."""
    modules = dict(model.named_modules())
    for name, layer in _named_plan(model, plan or {}).items():
        if layer.kind == "replicated":
            yield from modules[name].modules()


def _head_sizes(model: nn.Module, named: Mapping[str, LayerPlan]) -> set[int]:
    """Output features of the heads: the classes of a loss behind them."""
    modules = dict(model.named_modules())
    return {modules[name].out_features for name, layer in named.items() if layer.kind == "head"}  # type: ignore[misc]


def _check_present(module: Split | CrossEntropyLoss, grid: Grid, name: str) -> None:
    """A layer that is split already, as when a model is initialised twice, stays as it is.

    Raises:
        ValueError: it was split on another grid.
    """
    present = module.mesh.grid
    if present != grid and not getattr(module, "lies_apart", False):
        raise ValueError(
            f"layer {name} is split over {present} already, and cannot be over {grid}; use the same sizes, or a fresh model"
        )


def _scattering(model: nn.Module, named: Mapping[str, LayerPlan], grid: Grid) -> dict[str, bool]:
    """For each normal, transposed or head layer, by name: true if features between a pair are scattered over both axes.

    All layers of a pair must agree, so all of them scatter or none. The normal layers of a transposed one (q, k and v; gate and up) are
    those before it, and those beside it or inside of what is beside it, in a module that has no other, in whatever order they were made.
    """
    only = _only_transposed(model, named)
    pairs: list[set[str]] = []
    able: dict[str, bool] = {}
    waiting: list[str] = []
    for name, module in model.named_modules():
        kind = named[name].kind if name in named else None
        if kind == "normal":
            plan = named[name]
            able[name] = LinearSplit(parts=plan.parts, heads=plan.heads).can_scatter(_outputs(module), grid)
            holder = name.rpartition(".")[0]
            while holder and holder not in only:  # what is added to a pair's layer may lie deeper, as an adapter does
                holder = holder.rpartition(".")[0]
            if holder in only:
                _join(pairs, {name, only[holder]})
        if kind in ("normal", "group_norm"):
            waiting.append(name)
        elif kind == "transposed":
            _join(pairs, {*waiting, name})
            waiting = []
    found = {name: all(able.get(other, True) for other in pair) for pair in pairs for name in pair}
    heads = {name: True for name, layer in named.items() if layer.kind == "head"}
    return {**dict.fromkeys(waiting, False), **found, **heads}


def _only_transposed(model: nn.Module, named: Mapping[str, LayerPlan]) -> dict[str, str]:
    """The transposed layer of each module that holds just one."""
    holders: dict[str, list[str]] = {}
    for name, _ in model.named_modules():
        if name in named and named[name].kind == "transposed":
            holders.setdefault(name.rpartition(".")[0], []).append(name)
    return {holder: names[0] for holder, names in holders.items() if len(names) == 1}


def _join(sets: list[set[str]], names: set[str]) -> None:
    """Add names to the set that has some of them; sets that share one become one."""
    touched = [known for known in sets if known & names]
    sets[:] = [known for known in sets if known not in touched]
    sets.append(names.union(*touched))


def readers(model: nn.Module, named: Mapping[str, LayerPlan]) -> dict[str, tuple[str, ...]]:
    """For each normal linear that reads the same tensor as others, by name, the names of all of them.

    Presumed of equally wide ones of a module: where it holds several transposed layers, of those up to the same one.
    """
    only = _only_transposed(model, named)
    found: dict[tuple, list[str]] = {}
    passed: Counter[str] = Counter()
    for name, module in model.named_modules():
        layer, parent = named.get(name), name.rpartition(".")[0]
        size = features(module)
        if layer is None or size is None:
            continue
        if layer.kind == "transposed":
            passed[parent] += parent not in only
        elif layer.kind == "normal":
            word = (passed[parent], size[0]) if layer.reads is None else layer.reads
            found.setdefault((parent, word), []).append(name)
    return {name: tuple(names) for names in found.values() if len(names) > 1 for name in names}


def _outputs(module: nn.Module) -> int:
    size = features(module)
    return size[1] if size is not None else int(getattr(module, "out_features", 0) or module.out_channels)  # type: ignore[arg-type]


def _check_shared(placements: list[Placement], model: nn.Module) -> None:
    """A weight shared by several layers is split only where an embedding and a head share it."""
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append(name)
    kinds = {placement.name: placement.kind for placement in placements}
    for names in users.values():
        found = {kinds.get(name, "replicated") for name in set(names)}
        if len(found) > 1 and not found <= {"embedding", "head"}:
            raise ValueError(
                f"plan: layers {' and '.join(sorted(set(names)))} share a weight but become {' and '.join(sorted(found))}; "
                "name them embedding and head, or leave both out of the plan"
            )
