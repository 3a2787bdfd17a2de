"""An experts module dealt out over the expert ranks, each expert split over the tensor ranks; it is called as before."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from axonn_tp.comm.collectives import copy_to, reduce_from
from axonn_tp.comm.shard_gradients import OwnRead
from axonn_tp.context.sums import sharing
from axonn_tp.grid.distribute import broadcast, distribute
from axonn_tp.grid.layout import Layout
from axonn_tp.grid.mesh import Grid, Mesh
from axonn_tp.layers.activation import split_of
from axonn_tp.layers.weight import Split
from ted_moe.adapters.lists import DealtExperts, deal, stack_of
from ted_moe.adapters.local import Local
from ted_moe.adapters.trials import Cut, Experts
from ted_moe.dropless import through_experts
from ted_moe.gating import Routes, routes_to
from ted_moe.topology import Groups


@dataclass(frozen=True)
class Choices:
    """TED's optimizations that are on.

    Attributes:
        duplicate_token_dropping: tensor ranks send a share of the tokens each.
        fused: an all-reduce with a drop after it is one reduce-scatter.
        overlap_degree: slices of the tokens, each exchanged while experts work on another.
    """

    duplicate_token_dropping: bool = True
    fused: bool = True
    overlap_degree: int = 1


@dataclass
class Dealt:
    """An experts module as this rank has it, and the ranks with the rest of it.

    Attributes:
        found: the module as it was.
        cuts: how its parameters are split over the tensor ranks.
        groups: the process groups.
        choices: what is on.
        shapes: of this rank's part of each parameter.
        code: the module's own, for this rank's experts.
        number: of the module in exchanges.
        listed: names of parameters that are one expert's, of which those without rows have no gradient, as in one process.
        passed_by: tokens skip the experts, as while other layers are compared with the serial model's.
        types: of experts' outputs, by what they compute in.
    """

    found: Experts
    cuts: Mapping[str, Cut]
    groups: Groups
    choices: Choices
    shapes: dict[str, tuple[int, ...]]
    code: Local
    number: int
    listed: frozenset[str] = frozenset()
    passed_by: bool = False
    types: dict[Any, torch.dtype] = field(default_factory=dict)

    @property
    def split(self) -> bool:
        """True if this rank holds shards of experts."""
        return any(cut.dim is not None for cut in self.cuts.values())

    @property
    def whole(self) -> bool:
        """True if each tensor rank has other experts, and has them whole."""
        return self.groups.topology.expert_tensor == 1

    @torch.compiler.disable  # as `ted_moe.MoE`
    def mix(self, module: nn.Module, tokens: Tensor, routes: Routes) -> Tensor:
        """Send tokens to their experts and back.

        Args:
            module: with this rank's parameters.
            tokens: S × M, the same on all tensor ranks.
            routes: theirs.

        Raises:
            ValueError: tensor ranks were given other tokens; on all ranks that they would exchange them with.
        """
        drop = self.groups.size("tensor") > 1 and (self.choices.duplicate_token_dropping or self.whole)
        fused = drop and self.choices.fused and self.split
        run = partial(self._run, module, fused)
        trained = any(parameter.requires_grad for parameter in module.parameters())
        gathered = drop and not self.whole
        degree = self.choices.overlap_degree
        return through_experts(tokens, routes, run, self.groups, drop, gathered, fused, self.number, trained, degree)

    def _run(self, module: nn.Module, fused: bool, rows: Tensor, counts: list[int]) -> Tensor:
        """This rank's experts, or its shares of them, on rows sorted by expert."""
        parameters = {
            name: self._given(self.cuts[name], self._read(p).view(self.shapes[name]))
            for name, p in module.named_parameters()
        }
        if not len(rows):
            untouched = (p for name, p in parameters.items() if name not in self.listed)
            return _Untouched.apply(rows, self._type_of(module, rows, parameters), *untouched)
        sums = self.split and not fused
        rows = copy_to(rows, self.groups, "tensor") if sums else rows
        numbers = torch.arange(len(counts), device=rows.device)
        indices = numbers.repeat_interleave(torch.tensor(counts, device=rows.device))
        output = self.code(parameters, module.training, rows, indices[:, None], rows.new_ones(len(rows), 1))
        self.types[_computing_in(rows)] = output.dtype
        return reduce_from(output, self.groups, "tensor") if sums else output

    def _read(self, parameter: Tensor) -> Tensor:
        """Marked as the layer's own read, by which a loss that reads a rank's experts itself is told apart."""
        return OwnRead.apply(parameter) if self.groups.size("expert") > 1 else parameter

    @torch.no_grad()
    def _type_of(self, module: nn.Module, rows: Tensor, parameters: Mapping[str, Tensor]) -> torch.dtype:
        """The type of what experts make of such rows, which ranks with rows send: it need not be theirs, as under autocast."""
        key = _computing_in(rows)
        if key not in self.types and not key[1] and all(p.dtype == rows.dtype for p in parameters.values()):
            return rows.dtype
        if key not in self.types:
            one = rows.new_zeros(1, rows.shape[1])
            with torch.random.fork_rng([] if rows.device.type == "cpu" else [rows.device]):
                route = torch.zeros(1, 1, dtype=torch.int64, device=rows.device), rows.new_ones(1, 1)
                self.types[key] = self.code(parameters, module.training, one, *route).dtype
        return self.types[key]

    def _given(self, cut: Cut, parameter: Tensor) -> Tensor:
        if cut.once and self.split:
            return once(parameter, self.groups.rank("tensor") == 0)
        # What every rank uses, on its shares or, where experts are whole and all share it, on its rows, has a part of its gradient on each.
        partial = cut.dim is None and (self.split or (cut.common and self.whole))
        return copy_to(parameter, self.groups, "tensor") if partial else parameter


def _computing_in(rows: Tensor) -> tuple[Any, ...]:
    kind = rows.device.type
    on = torch.is_autocast_enabled(kind)
    return rows.dtype, on, torch.get_autocast_dtype(kind) if on else None


class _Part(Split):
    """Mixed into what holds experts' parameters."""

    lies_apart = True


class SpreadExperts(_Part):
    """Mixed into an experts module: tokens are sent to the ranks that have their experts, and what these make of them back."""

    axonn_dealt: Dealt

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """The weighted sum of each token's experts: what the module gave before, on any number of tokens a rank.

        Raises:
            ValueError: something else is given than hidden states, indices and weights; tensor ranks were given other tokens.
        """
        dealt = self.axonn_dealt
        arguments = dealt.found.arguments
        named = dict(zip(arguments, given, strict=False)) | named
        if set(named) != set(arguments) or len(given) > 3:
            raise ValueError(
                f"{type(self).__name__} was called with {', '.join(named)} and {len(given)} positions; under axonn.ted it takes "
                f"{', '.join(arguments)} alone"
            )
        hidden, indices, weights = (named[name] for name in arguments)
        if split_of(hidden) is not None:
            raise ValueError(
                f"{type(self).__name__} was given shares of an activation, and what calls it is more than a mixture, which would make them whole; "
                "leave embeddings and norms out of the plan"
            )
        if dealt.passed_by:
            return hidden
        tokens = hidden.reshape(-1, hidden.shape[-1])
        routed = indices.shape[:-1].numel() if indices.dim() > 1 else len(indices)
        if routed != len(tokens):
            raise ValueError(
                f"{type(self).__name__} was given {len(tokens)} tokens and experts of {routed}; under axonn.ted each token needs its own"
            )
        chosen = indices.shape[-1] if indices.dim() > 1 else 1
        indices, weights = indices.reshape(len(tokens), chosen), weights.reshape(len(tokens), chosen)
        with sharing(None):  # no number of experts or rows is one of places in a sequence
            return dealt.mix(self, tokens, routes_to(indices, weights, dealt.found.count)).reshape(hidden.shape)


class _Once(torch.autograd.Function):
    """The summand that one rank adds before a sum over ranks, each of which gets the whole gradient back; the others add zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, here: bool) -> Tensor:
        return tensor.view_as(tensor) if here else torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def once(tensor: Tensor, here: bool) -> Tensor:
    """The tensor itself on one of the ranks whose outputs are summed, zeros on the others, as for a bias; its gradient is the same on all of them.

    Args:
        tensor: the same on these ranks.
        here: this is the rank.
    """
    return _Once.apply(tensor, here)


class _Untouched(torch.autograd.Function):
    """No rows: nothing is computed, and the gradients are zeros, so that backward communicates as on other ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dtype: torch.dtype, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        ctx.dtype = rows.dtype
        return rows.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.to(ctx.dtype), None, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def adopt(found: Experts, cuts: Mapping[str, Cut], groups: Groups, mesh: Mesh, choices: Choices) -> None:
    """Keep this rank's part of an experts module, in place; every rank calls it.

    Args:
        found: the module.
        cuts: how its parameters are split over the tensor ranks.
        groups: the process groups.
        mesh: the ranks on the experts' grid: tensor is x where experts are split, expert is z, expert data is data.
        choices: see there.
    """
    module, tensor = found.module, groups.size("tensor")
    local, split = found.count // groups.size("expert"), any(cut.dim is not None for cut in cuts.values())
    lists: dict[str, Any] = {prefix: module.get_submodule(prefix.removesuffix(".")) for prefix in found.lists}
    for parameter in module.parameters():
        broadcast(parameter, mesh)
    for listed in lists.values():
        deal(listed, groups.rank("expert"), groups.size("expert"))
    code = Local(module, (found.count, local), tensor if split else 1, found.lists, trial=False)
    own, shapes = {}, {}
    for name, parameter in module.named_parameters():
        stack = stack_of(name, lists)
        own[name] = cuts[stack] if stack == name else _of_one(cuts[stack])
        layout = layout_for(tuple(parameter.shape), own[name], mesh.grid, stack != name)
        shapes[name] = _local_shape(layout, mesh.grid)
        if stack != name:
            distribute(parameter, layout, mesh.grid, mesh.coordinates, mesh.device)
    for prefix, holder in _holders(module, lists).items():
        layouts = {
            name: layout_for(tuple(parameter.shape), own[prefix + name], mesh.grid)
            for name, parameter in holder._parameters.items()
            if parameter is not None
        }
        kind, mixin = type(holder), SpreadExperts if holder is module else _Part
        first = (DealtExperts,) if prefix in lists else ()
        holder.__class__ = type(kind.__name__, (*first, mixin, kind), {})
        holder._split(mesh, layouts)
        if prefix in lists:
            holder.home = groups.rank("expert")
    assert isinstance(module, SpreadExperts)
    alone = frozenset(name for name in own if stack_of(name, lists) != name and not found.calls_every)
    module.axonn_dealt = Dealt(found, own, groups, choices, shapes, code, groups.enrol(found.name), alone)


def _of_one(cut: Cut) -> Cut:
    """The cut of one expert's parameter, from that of the stack."""
    return cut if cut.dim is None else replace(cut, dim=cut.dim - 1)


def _holders(module: nn.Module, lists: Collection[str]) -> dict[str, Any]:
    """The modules with parameters of their own that are not one expert's, the lists, and this one, by the prefix of their names."""
    named = {f"{name}." if name else "": one for name, one in module.named_modules()}
    return {
        prefix: one
        for prefix, one in named.items()
        if one is module or prefix in lists or (one._parameters and stack_of(prefix, lists) == prefix)
    }


def layout_for(shape: tuple[int, ...], cut: Cut, grid: Grid, alone: bool = False) -> Layout:
    """The layout of a parameter on the experts' grid: z cuts a flattened stack between experts, and has others of one that is alone."""
    if cut.common:
        return Layout(shape)
    split = () if cut.dim is None or grid.gx == 1 else ((cut.dim, "x"),)
    parts, dim = (cut.parts, cut.dim or 0) if split else (1, 0)
    home = ("z",) if alone else ()
    return Layout(shape, split, parts, over_z=not alone, home=home, grid=grid, parts_dim=dim)


def _local_shape(layout: Layout, grid: Grid) -> tuple[int, ...]:
    shape = layout.block_shape(grid)
    return (shape[0] // grid.gz, *shape[1:]) if layout.over_z else shape


@contextmanager
def passing_by(model: nn.Module) -> Iterator[None]:
    """Tokens skip the experts."""
    dealt = [module.axonn_dealt for module in model.modules() if isinstance(module, SpreadExperts)]
    for one in dealt:
        one.passed_by = True
    try:
        yield
    finally:
        for one in dealt:
            one.passed_by = False
