"""A mixture with its router in a model whose other layers are split over x and y: inside, every rank has whole tokens.

So the router is the model's own, and gives every tensor rank the same routes, as TED's layers are to have.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from axonn_tp.grid.distribute import broadcast
from axonn_tp.grid.layout import layout_of
from axonn_tp.grid.mesh import Mesh
from axonn_tp.layers.activation import split_of
from axonn_tp.layers.boundary import share_again, whole_activation
from ted_moe.adapters.trials import Experts


class Block(nn.Module):
    """Mixed into a module that holds experts and their router: takes activations however the stream is split, and gives such."""

    mesh: Mesh
    axonn_hidden: str

    def forward(self, *given: Any, **named: Any) -> Any:
        """The module's own forward on whole tokens."""
        hidden_states, given, named = _taken(self.axonn_hidden, given, named)
        split = split_of(hidden_states)
        ranks = self.mesh.size("y") if split is not None and "y" in split.over else 1
        whole = whole_activation(hidden_states, self.mesh, hidden_states.shape[-1] * ranks)
        outputs: Any = super().forward(whole, *given, **named)
        if isinstance(outputs, tuple):
            return (share_again(outputs[0], hidden_states, self.mesh), *outputs[1:])
        return share_again(outputs, hidden_states, self.mesh)


def enclose(block: nn.Module, mesh: Mesh) -> None:
    """Make a module a `Block`, in place; every rank calls it.

    Its parameters but the experts stay whole on every rank, which computes all of their gradients.
    """
    kind = type(block)
    block.__class__ = type(kind.__name__, (Block, kind), {})
    block.mesh, block.axonn_hidden = mesh, _hidden(kind)  # type: ignore[assignment]
    for parameter in block.parameters():
        if not hasattr(parameter, "axonn_layout"):
            broadcast(parameter, mesh)
            parameter.axonn_layout = layout_of(parameter)  # type: ignore[attr-defined]


def _hidden(kind: type[nn.Module]) -> str:
    """The name of what a forward takes first."""
    return [*inspect.signature(kind.forward).parameters][1]


def _taken(name: str, given: tuple, named: dict[str, Any]) -> tuple[Tensor, tuple, dict[str, Any]]:
    """Hidden states, by position or by name, and the rest."""
    if given:
        return given[0], given[1:], named
    return named[name], given, {key: value for key, value in named.items() if key != name}


def blocks_of(model: nn.Module, found: Mapping[str, Experts]) -> dict[str, Experts]:
    """The experts by the name of the module around each, where that gives a token's mixture for each token and nothing else.

    Where it does more, as a decoder layer that holds router and experts itself, the stream stays whole and nothing need be enclosed.
    """
    outer = {name: name.rpartition(".")[0] for name in found}
    return {
        outer[name]: experts
        for name, experts in found.items()
        if _is_by_token(_without(model.get_submodule(outer[name]), experts), _width_of(model, experts))
    }


def _width_of(model: nn.Module, experts: Experts) -> int:
    """Features of the stream that a mixture takes."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    width = getattr(config, "hidden_size", None)
    return width if isinstance(width, int) else experts.features


class _PassedBy(nn.Module):
    """Mixed into experts, which are known to be by token: they need not compute, and their weights not be read."""

    axonn_hidden: str

    def forward(self, *given: Any, **named: Any) -> Tensor:
        hidden: Tensor = given[0] if given else named[self.axonn_hidden]
        return hidden


def _without(block: nn.Module, experts: Experts) -> nn.Module:
    """A copy of a block in which the experts are passed by."""
    inner, made = _passed_by(experts), copy.copy(block)
    made._modules = {name: inner if child is experts.module else child for name, child in block._modules.items()}
    return made


def _passed_by(experts: Experts) -> nn.Module:
    """A copy of experts that gives back what it is given."""
    made: Any = copy.copy(experts.module)
    kind = type(made)
    made.__class__ = type(kind.__name__, (_PassedBy, kind), {"axonn_hidden": experts.arguments[0]})
    return made


@torch.no_grad()
def _is_by_token(block: nn.Module, width: int) -> bool:
    """True if a module computes each token's output from that token alone."""
    weight = next(block.parameters())
    training = [module for module in block.modules() if module.training]
    tokens = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(0)).to(weight)
    kept = [(one, key, b, b.clone()) for one in block.modules() for key, b in one._buffers.items() if b is not None]
    try:
        block.eval()
        first, other = (_first(block(given.clone())) for given in (tokens, tokens.flip(1)))
        close = 1e-3 if weight.dtype in (torch.float32, torch.float64) else 0.1
        return first.shape == tokens.shape and bool((first - other.flip(1)).norm() <= close * first.norm())
    except Exception:  # whatever a module raises that needs more than hidden states
        return False
    finally:
        for module in training:
            module.training = True
        for module, key, buffer, values in kept:  # counts of tokens, as routers keep them
            module._buffers[key] = buffer.copy_(values)


def _first(outputs: Any) -> Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs


class _StandIn(nn.Module):
    """Mixed into a mixture with a router alone: needs all features of a token, and runs without experts."""

    axonn_boundary = True
    axonn_hidden: str

    def forward(self, *given: Any, **named: Any) -> Any:
        hidden_states, given, named = _taken(self.axonn_hidden, given, named)
        # What the router says is heard by losses outside.
        outputs: Any = super().forward(hidden_states, *given, **named)
        mixed = torch.tanh(hidden_states + hidden_states.mean(-1, keepdim=True))
        return (mixed, *outputs[1:]) if isinstance(outputs, tuple) else mixed


class _Skipped(nn.Module):
    """In the place of experts."""

    def forward(self, hidden_states: Tensor, *rest: Any, **named: Any) -> Tensor:
        return hidden_states


@contextmanager
def stand_ins(model: nn.Module, blocks: Mapping[str, Experts], found: Mapping[str, Experts]) -> Iterator[None]:
    """While a plan for the other layers is looked for, the experts are not there.

    Args:
        model: the model.
        blocks: see `blocks_of`.
        found: all experts, of which those in lists have layers that a plan would name.
    """
    listed = {name: one for name, one in found.items() if one.lists and name.rpartition(".")[0] not in blocks}
    there = {name: model.get_submodule(name) for name in (*blocks, *listed)}
    for name, experts in listed.items():
        passed = _passed_by(experts)
        passed._modules, passed._parameters = {}, {}
        _put(model, name, passed)
    for name, block in ((name, there[name]) for name in blocks):
        made: Any = copy.copy(block)
        made.__class__ = type(type(block).__name__, (_StandIn, type(block)), {"axonn_hidden": _hidden(type(block))})
        made._modules = {
            each: child if child is None or _is_router(child, blocks[name]) else _Skipped()
            for each, child in block._modules.items()
        }
        _put(model, name, made)
    try:
        yield
    finally:
        for name, block in there.items():
            _put(model, name, block)


def _is_router(module: nn.Module, experts: Experts) -> bool:
    """True if a module scores the experts: its one matrix has a row for each expert."""
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    return module is not experts.module and len(matrices) == 1 and matrices[0].shape[0] == experts.count


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)
