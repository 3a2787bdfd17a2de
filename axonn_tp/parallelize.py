"""Turn a serial model into a parallel one, in place.

First a plan (`place`, pure: module names and shapes in, placements or an error out), then the change
(`parallelize`: layer by layer, so that of a model on the meta device no rank holds more than one full layer).
"""

from __future__ import annotations

import difflib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.nn.modules.conv import _ConvNd

from axonn_tp.accumulation import accumulate_as
from axonn_tp.collectives import Collective
from axonn_tp.conv import Conv, check_conv, conv_collectives, conv_layout, is_conv, positions_made
from axonn_tp.counts import check_counts, count_locally
from axonn_tp.dropout import watch_dropout
from axonn_tp.embedding import Embedding, check_embedding, embedding_collectives, embedding_layout
from axonn_tp.group_norm import GroupNorm, check_group_norm, group_norm_layout
from axonn_tp.layout import Layout
from axonn_tp.linear import Linear, LinearSplit, features, linear_collectives
from axonn_tp.loss import CrossEntropyLoss, check_loss, loss_collectives
from axonn_tp.materialise import Materialiser
from axonn_tp.mesh import Grid, Mesh
from axonn_tp.norm import LayerNorm, check_norm, norm_collectives, norm_layout
from axonn_tp.options import Options
from axonn_tp.overlap import Gathers
from axonn_tp.rms_norm import RMSNorm, check_rms_norm, is_rms_norm, rms_norm_collectives, rms_norm_layout
from axonn_tp.tuning import TunedMatmul, Tuner
from axonn_tp.tuning_cache import default_cache
from axonn_tp.unnamed import sum_unnamed
from axonn_tp.weight import Split, SplitWeight

KINDS: dict[str, str] = {
    "normal": "linear or convolution: contracts over y, output split over x",
    "transposed": "linear or convolution: contracts over x, output split over y, or whole where no embedding starts a split stream",
    "head": "linear: like normal, its output features padded to a multiple of gx",
    "self_contained": "linear or convolution: whole features in and out, sizes padded where needed; what unnamed ones become",
    "embedding": "embedding: vocabulary over x, features over y; from here on features are split over y",
    "norm": "LayerNorm or RMSNorm over features split over y",
    "group_norm": "GroupNorm between a normal and a transposed layer, over channels split as the normal one leaves them",
    "loss": "CrossEntropyLoss over a vocabulary split over x",
    "replicated": "left as it is, the same on every rank of x and y",
}
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


@dataclass(frozen=True)
class LayerPlan:
    """What a layer becomes.

    Attributes:
        kind: a key of `KINDS`.
        parts: for linears, see `LinearSplit`.
        heads: for linears, see `LinearSplit`.
        counts: for normal layers: integer attributes (``name`` or ``config.name``) of the module that holds the layer,
            which its forward reads and which must be divided by the number of shares, such as ``num_heads``.
    """

    kind: str
    parts: int = 1
    heads: int | None = None
    counts: tuple[str, ...] = ()


@dataclass
class Placement:
    """One module's place in the parallel model."""

    name: str
    module: nn.Module = field(repr=False)
    kind: str
    split: LinearSplit | None = None
    options: Options = field(default=Options(), repr=False)
    scatter_tokens: bool = False
    classes: int | None = None
    tied: bool = False
    scatter: bool = False
    counts: tuple[str, ...] = ()

    def _size(self) -> tuple[int, int]:
        """(out, in) features of a linear."""
        if isinstance(self.module, nn.Linear):
            return self.module.out_features, self.module.in_features
        size = features(self.module)
        assert size is not None
        return size[1], size[0]

    def layouts(self) -> dict[str, Layout]:
        """Layouts of the module's own parameters, by name."""
        module = self.module
        own = {name: tuple(p.shape) for name, p in module._parameters.items() if p is not None}
        if isinstance(module, _ConvNd) and self.split is not None:
            bias = {"bias": self.split.bias_layout(module.out_channels)} if "bias" in own else {}
            return {"weight": conv_layout(module, self.split), **bias}
        if self.split is not None:
            bias = {"bias": self.split.bias_layout(self._size()[0])} if "bias" in own else {}
            return {"weight": self.split.weight_layout(*self._size()), **bias}
        if self.kind == "embedding":
            return {"weight": embedding_layout(own["weight"], self.tied)}
        if self.kind == "group_norm":
            return {name: group_norm_layout(shape[0], self.inner_axes) for name, shape in own.items()}
        if not isinstance(module, nn.LayerNorm):
            return {name: rms_norm_layout(shape[0], self.scatter_tokens) for name, shape in own.items()}
        return {name: norm_layout(shape, self.scatter_tokens) for name, shape in own.items()}

    def collectives(self, tokens: int, grid: Grid) -> list[Collective]:
        """What one forward and backward pass over `tokens` rows of this rank's x-y plane communicates.

        Rows of a convolution are images × positions of its input; its padding is taken to keep the image's size. What
        a GroupNorm communicates, where a group is cut, depends on the number of images and is left out.
        """
        module = self.module
        if isinstance(module, _ConvNd) and self.split is not None:
            made = positions_made(module, tokens)
            return conv_collectives(module, tokens, made, grid, self.split, self.options.reshard_after_forward)
        if self.split is not None:
            again, (n, k) = self.options.reshard_after_forward, self._size()
            return linear_collectives(tokens, k, n, grid, self.split, again)
        if self.kind == "embedding":
            return embedding_collectives(tokens, self.layouts()["weight"], grid, self.scatter_tokens)
        if self.kind == "norm":
            count = norm_collectives if isinstance(module, nn.LayerNorm) else rms_norm_collectives
            return count(tokens // grid.gx if self.scatter_tokens else tokens, grid)
        if self.kind == "loss":
            return loss_collectives(tokens, grid, self.loss_axes, module.label_smoothing)  # type: ignore[arg-type]
        return []

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """Axes over which the classes of a loss are split."""
        return ("x", "y") if self.options.scattered else ("x",)

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """Axes over which the channels between a normal and a transposed layer are split."""
        return ("x", "y") if self.scatter else ("x",)


def _is_linear(module: nn.Module) -> bool:
    """A linear whose weight is its own parameter and whose forward is torch's, so that replacing it changes nothing."""
    return features(module) is not None and "weight" in module._parameters


def _inside_attention(model: nn.Module) -> set[int]:
    """Projections of nn.MultiheadAttention: it reads their weights directly and never calls them."""
    return {
        id(child)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.modules()
    }


def free_layers(model: nn.Module) -> set[str]:
    """Names of the linears and convolutions that can be split by themselves: nobody else reads or shares their weights."""
    holders = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    attention = _inside_attention(model)
    return {
        name
        for name, module in model.named_modules()
        if (_is_linear(module) or is_conv(module)) and id(module) not in attention and holders[id(module.weight)] == 1  # type: ignore[arg-type]
    }


def _named_plan(model: nn.Module, plan: Mapping[str, LayerPlan]) -> dict[str, LayerPlan]:
    """The plan by module name. The first pattern that matches a module wins.

    Raises:
        ValueError: a pattern matches nothing, or a module of the wrong class.
    """
    modules = dict(model.named_modules())
    named: dict[str, LayerPlan] = {}
    for pattern, layer in plan.items():
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
            named.setdefault(name, layer)
    return named


def place(
    model: nn.Module, grid: Grid, plan: Mapping[str, LayerPlan] | None = None, options: Options | None = None
) -> list[Placement]:
    """Decide what every layer becomes; touches nothing.

    Args:
        model: the serial model, on any device including meta.
        grid: the grid.
        plan: `LayerPlan` by name pattern (``*`` matches anything); linears and convolutions it does not name become self-contained.
        options: of these the layout decides how activations travel.

    Returns:
        Placements of all modules that change, in the order of `named_modules`.

    Raises:
        ValueError: names the layer or the pattern, what is wrong and what to do.
    """
    named, options = _named_plan(model, plan or {}), options or Options()
    kinds = {layer.kind for layer in named.values()}
    stream_split = "embedding" in kinds
    if "norm" in kinds and not stream_split:
        raise ValueError(
            "plan: norm needs features split over y, which an embedding layer starts; name the embedding, or leave norms out"
        )
    if "group_norm" in kinds and "normal" not in kinds:
        raise ValueError(
            "plan: group_norm needs channels split over x, which a normal layer before it makes; name that layer, or leave group norms out"
        )
    if "loss" in kinds and "head" not in kinds:
        raise ValueError(
            "plan: loss needs logits split over x, which a head layer makes; name the head, or leave the loss out"
        )
    free = free_layers(model)
    modules = dict(model.named_modules())
    scatter_tokens = stream_split and options.scattered
    heads = {id(m.weight) for name, m in modules.items() if name in named and named[name].kind == "head"}
    scattering = _scattering(model, named, grid) if options.scattered else {}
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
        split = None
        scatter = scattering.get(name, False)
        if nn.Linear in _CLASSES[layer.kind]:
            split = linear_split(layer, stream_split, scatter_tokens, "loss" in kinds, scatter)
            if isinstance(module, _ConvNd):
                check_conv(module, split, grid, name)
            else:
                split.check(*Placement(name, module, layer.kind)._size(), grid, name)
            shares = math.prod(grid.size(axis) for axis in split.split_over)
            check_counts(modules[name.rpartition(".")[0]], layer.counts, shares, name)
        elif layer.kind == "embedding":
            check_embedding(module, grid, name)  # type: ignore[arg-type]
        elif layer.kind == "norm":
            check = check_norm if isinstance(module, nn.LayerNorm) else check_rms_norm
            check(module, grid, name)  # type: ignore[arg-type]
        elif layer.kind == "group_norm":
            check_group_norm(module, grid, ("x", "y") if scatter else ("x",), name)  # type: ignore[arg-type]
        elif layer.kind == "loss":
            check_loss(module, _head_sizes(model, named), name)  # type: ignore[arg-type]
        classes = min(_head_sizes(model, named)) if layer.kind == "loss" else None
        tied = layer.kind == "embedding" and id(module.weight) in heads
        placements.append(
            Placement(name, module, layer.kind, split, options, scatter_tokens, classes, tied, scatter, layer.counts)
        )
    _check_shared(placements, model)
    return placements


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
    if present != grid:
        raise ValueError(
            f"layer {name} is split over {present} already, and cannot be over {grid}; use the same sizes, or a fresh model"
        )


def _scattering(model: nn.Module, named: Mapping[str, LayerPlan], grid: Grid) -> dict[str, bool]:
    """By name of a normal, transposed or head layer: whether features between a pair are scattered over both axes.

    The normal layers before a transposed one (q, k and v; gate and up) must agree, so all of them scatter or none.
    """
    found: dict[str, bool] = {}
    pair: list[str] = []
    can = True
    for name, module in model.named_modules():
        kind = named[name].kind if name in named else None
        if kind == "head":
            found[name] = True
        elif kind == "normal":
            plan, n = named[name], _outputs(module)
            pair.append(name)
            can &= LinearSplit(parts=plan.parts, heads=plan.heads).can_scatter(n, grid)
        elif kind == "group_norm":
            pair.append(name)
        elif kind == "transposed":
            found |= dict.fromkeys([*pair, name], can)
            pair, can = [], True
    return found | dict.fromkeys(pair, False)


def _outputs(module: nn.Module) -> int:
    size = features(module)
    return size[1] if size is not None else int(getattr(module, "out_features", 0) or module.out_channels)  # type: ignore[arg-type]


def linear_split(
    layer: LayerPlan,
    stream_split: bool = False,
    scatter_tokens: bool = False,
    loss_split: bool = False,
    scatter: bool = False,
) -> LinearSplit:
    """How a linear or a convolution of a plan uses the grid.

    Args:
        layer: its plan.
        stream_split: the plan has an embedding, after which features are split over y.
        scatter_tokens: and tokens are scattered over x.
        loss_split: the plan has a loss over a split vocabulary.
        scatter: features between the pair are scattered over both axes.
    """
    stream = "tokens" if scatter_tokens else "split" if stream_split else "whole"
    inner = "features" if scatter else "split"
    takes, gives = {
        "normal": (stream, inner),
        "transposed": (inner, stream),
        "head": (stream, inner if loss_split else "whole"),
        "self_contained": ("whole", "whole"),
    }[layer.kind]
    return LinearSplit(
        transposed=layer.kind == "transposed",
        parts=layer.parts,
        heads=layer.heads,
        takes=takes,
        gives=gives,
        pad=layer.kind == "self_contained",
        pad_vocabulary=layer.kind == "head",
    )


def _check_shared(placements: list[Placement], model: nn.Module) -> None:
    """A weight shared by several layers is split only where an embedding and a head share it."""
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
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


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    plan: Mapping[str, LayerPlan] | Literal["auto"] | None = None,
    options: Options | None = None,
    example_inputs: Any = None,
) -> nn.Module:
    """Turn a serial model into a parallel one, in place; every rank calls it.

    Rank 0's weights are what is split. A model on the meta device is built layer by layer, each module by its own
    `reset_parameters()` in the order of `named_modules`, so the same seed gives the serial model's weights (HF models:
    by their `_init_weights`, see `axonn_tp.materialise`).

    Args:
        model: the serial model; optimizers that already hold its parameters keep holding them.
        mesh: the mesh.
        plan: see `place`; ``"auto"`` finds one and prints it on rank 0 (see `auto_plan`).
        options: layout of activations, overlap, what is kept; see `Options`.
        example_inputs: for the automatic plan, see `auto_plan`.

    Returns:
        `model`.

    Raises:
        ValueError: see `place`.
    """
    options = options or Options()
    if plan == "auto":
        # The search builds on this file's plans.
        from axonn_tp.auto import auto_plan

        plan, report = auto_plan(model, mesh.grid, example_inputs, options)
        if dist.get_rank() == 0:
            print(report, flush=True)
    elif isinstance(plan, str):
        raise ValueError(f'plan = {plan!r} is not a plan; give LayerPlans by name pattern, or "auto"')
    gathers = Gathers(mesh, options)
    tuner = Tuner(mesh.device, default_cache()) if options.tune_matmuls else None
    placements = {placement.name: placement for placement in place(model, mesh.grid, plan, options)}
    materialise = Materialiser(model, mesh.device)
    seen: set[int] = set()
    for name, module in model.named_modules():
        materialise(module)
        if isinstance(module, Split):
            module.remark()
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in seen and not hasattr(parameter, "axonn_layout"):
                seen.add(id(parameter))
                _broadcast(parameter, mesh)
        if name in placements:
            _convert(placements[name], mesh, gathers)
        if tuner is not None and isinstance(module, Linear):
            module.operation = TunedMatmul(tuner)
        if isinstance(module, nn.TransformerEncoder):
            # Nested tensors are only for the layers' fast path, which is off.
            module.use_nested_tensor = False
    watch_dropout(model, mesh)
    sum_unnamed(model, mesh)
    _count_locally(model, placements)
    _watch_forward(model, mesh, tuner)
    accumulate_as(model, options)
    return model


class _Forward:
    """What a model's hooks know of it; a copy of the model has its own."""

    def __init__(self, model: nn.Module, mesh: Mesh, tuner: Tuner | None) -> None:
        self.tuner = tuner
        split = [module for module in model.modules() if isinstance(module, Split)]
        # A model that was split before keeps the mesh it was split on.
        self.meshes = {mesh, *(module.mesh for module in split)}
        self.layers: dict[Gathers, list[SplitWeight]] = defaultdict(list)
        for module in split:
            if isinstance(module, SplitWeight):
                self.layers[module.gathers].append(module)


def _watch_forward(model: nn.Module, mesh: Mesh, tuner: Tuner | None) -> None:
    """While the model's forward runs, code that reads a split layer's weight finds it whole."""
    known = hasattr(model, "axonn_forward")
    model.axonn_forward = _Forward(model, mesh, tuner)  # type: ignore[assignment]
    if not known:
        model.register_forward_pre_hook(_enter_forward, prepend=True)
        model.register_forward_hook(_leave_forward, always_call=True)


def _enter_forward(model: nn.Module, inputs: tuple) -> None:
    forward: _Forward = model.axonn_forward  # type: ignore[assignment]
    for mesh in forward.meshes:
        mesh.enter_forward()
    if forward.tuner is not None and forward.tuner.stepped and not forward.tuner.finished:
        forward.tuner.finish()
    for gathers, layers in forward.layers.items():
        # In `as_serial` layers are plain, and gather for themselves.
        if all(isinstance(layer, SplitWeight) for layer in layers):
            gathers.begin(layers)


def _leave_forward(model: nn.Module, inputs: tuple, output: object) -> None:
    for mesh in model.axonn_forward.meshes:  # type: ignore[union-attr]
        mesh.leave_forward()


def _broadcast(parameter: nn.Parameter, mesh: Mesh) -> None:
    """Rank 0's values, on the mesh's device: NCCL sends nothing from the CPU, where a model is often built."""
    if dist.get_world_size() > 1 and parameter.numel():
        whole = parameter.data.to(mesh.device).contiguous()
        dist.broadcast(whole, src=0)
        parameter.data = whole


def _convert(placement: Placement, mesh: Mesh, gathers: Gathers) -> None:
    module = placement.module
    if isinstance(module, _ConvNd) and placement.split is not None:
        Conv.convert(module, mesh, placement.split, placement.options)
    elif placement.split is not None:
        Linear.convert(module, mesh, placement.split, placement.options)  # type: ignore[arg-type]
    elif placement.kind == "embedding":
        Embedding.convert(module, mesh, placement.scatter_tokens, placement.tied)  # type: ignore[arg-type]
    elif placement.kind == "norm":
        norm = LayerNorm if isinstance(module, nn.LayerNorm) else RMSNorm
        norm.convert(module, mesh, placement.scatter_tokens)  # type: ignore[arg-type]
    elif placement.kind == "group_norm":
        GroupNorm.convert(module, mesh, placement.inner_axes)  # type: ignore[arg-type]
    else:
        CrossEntropyLoss.convert(module, mesh, placement.loss_axes, placement.classes)  # type: ignore[arg-type]
    if isinstance(module, SplitWeight):
        module.gathers = gathers
    # An optional fast path of nn.TransformerEncoderLayer reads weights directly; a hook keeps it off.
    module.register_forward_pre_hook(_keep_slow_path)


def _count_locally(model: nn.Module, placements: Mapping[str, Placement]) -> None:
    """Divide what plans name as counts, once where several layers of one module name it."""
    done: set[tuple[str, str]] = set()
    for name, placement in placements.items():
        holder = name.rpartition(".")[0]
        names = [count for count in placement.counts if (holder, count) not in done]
        done.update((holder, count) for count in names)
        if names:
            count_locally(model.get_submodule(holder), names, partial(_shares, placement.module))


def _shares(layer: nn.Module) -> int:
    """Into how many shares a layer's output is split now; one where it computes as in the serial model (`as_serial`)."""
    return math.prod(layer.mesh.size(axis) for axis in layer.split.split_over) if isinstance(layer, Linear) else 1


def _keep_slow_path(module: nn.Module, inputs: tuple) -> None:
    return None
