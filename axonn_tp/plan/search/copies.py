"""A copy of a model that runs in float64 on the CPU without the weights of its linears and embeddings."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from axonn_tp.layers.linear_split import features

_LARGEST_PARAMETER = 1 << 22


def weightless_copy(model: nn.Module) -> tuple[nn.Module, set[int], bool]:
    """The copy; the ids of its buffers that had no values, of a model on the meta device: these are drawn; and whether a forward was replaced.

    Raises:
        Exception: the model cannot be copied.
    """
    generator = torch.Generator().manual_seed(1)
    memo: dict[int, Any] = {}
    bare = set(_weights_of_shadowed(model))
    for parameter in model.parameters():
        memo[id(parameter)] = _stand_in(parameter, id(parameter) in bare, generator)
    copied = copy.deepcopy(model, memo).eval()
    drawn: set[int] = set()
    replaced = False
    for module in copied.modules():
        drawn |= _settle(module, generator)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.update({key: _keeping_apart(hook, memo) for key, hook in hooks.items()})
        forward = vars(module).get("forward")
        if (of_copy := _of_copy(forward, memo)) is not forward:
            module.forward, replaced = of_copy, True
    return copied, drawn, replaced


def _of_copy(held: Any, memo: dict[int, Any]) -> Any:
    """The copy of an object that a function in a forward's place holds, such as the forward that it calls: the copy's for the model's."""
    if isinstance(held, nn.Module):
        return memo.get(id(held), held)
    if isinstance(held, MethodType):
        function, owner = _of_copy(held.__func__, memo), _of_copy(held.__self__, memo)
        return held if function is held.__func__ and owner is held.__self__ else MethodType(function, owner)
    if isinstance(held, partial):
        function = _of_copy(held.func, memo)
        return held if function is held.func else partial(function, *held.args, **held.keywords)
    if not isinstance(held, FunctionType) or id(held) in memo:
        return held
    memo[id(held)] = held  # a function may hold itself
    cells = [cell if _empty(cell) else _cell(cell, memo) for cell in held.__closure__ or ()]
    if all(one is other for one, other in zip(cells, held.__closure__ or (), strict=True)):
        return held
    made = FunctionType(held.__code__, held.__globals__, held.__name__, held.__defaults__, tuple(cells))
    made.__kwdefaults__ = held.__kwdefaults__
    made.__dict__.update(held.__dict__)
    return made


def _keeping_apart(hook: Any, memo: dict[int, Any]) -> Any:
    """A hook of the copy that notes what it sees in lists and tables of its own, and not in the script's; methods and objects are copied already."""
    if not isinstance(hook, FunctionType) or id(hook) in memo:
        return memo.get(id(hook), hook)

    def own(held: Any) -> Any:
        if isinstance(held, FunctionType):
            return _keeping_apart(held, memo)
        if not isinstance(held, list | dict | set | deque):
            return _of_copy(held, memo)
        try:
            return copy.deepcopy(held, memo)
        except Exception:  # what it holds, as results of earlier passes, cannot be copied
            return memo.setdefault(id(held), copy.copy(held))

    named = {name: hook.__globals__[name] for name in hook.__code__.co_names if name in hook.__globals__}
    named = {name: own(held) for name, held in named.items() if isinstance(held, list | dict | set | deque)}
    cells = [cell if _empty(cell) else CellType(own(cell.cell_contents)) for cell in hook.__closure__ or ()]
    seen = {**hook.__globals__, **named} if named else hook.__globals__
    made = FunctionType(hook.__code__, seen, hook.__name__, None, tuple(cells))
    made.__defaults__ = None if hook.__defaults__ is None else tuple(map(own, hook.__defaults__))
    made.__kwdefaults__ = {name: own(held) for name, held in (hook.__kwdefaults__ or {}).items()} or None
    made.__dict__.update(hook.__dict__)
    made.__module__ = hook.__module__
    return memo.setdefault(id(hook), made)


def _cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    found = _of_copy(cell.cell_contents, memo)
    return cell if found is cell.cell_contents else CellType(found)


def _empty(cell: CellType) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def _weights_of_shadowed(model: nn.Module) -> Iterator[int]:
    """Parameters that no run needs: those of linears and embeddings, unless somebody else reads them directly."""
    inside = {id(m) for mha in model.modules() if isinstance(mha, nn.MultiheadAttention) for m in mha.modules()}
    for module in model.modules():
        if id(module) not in inside and (features(module) or is_embedding(module)):
            yield from (id(p) for p in module._parameters.values() if p is not None)


def _stand_in(parameter: nn.Parameter, bare: bool, generator: torch.Generator) -> nn.Parameter:
    shape = parameter.shape
    if bare or parameter.numel() > _LARGEST_PARAMETER:
        data = torch.full((1,), 1e-3, dtype=torch.float64).expand(shape)
    else:
        # Not the model's own numbers: a gate that starts at zero would hide what passes through it.
        data = 1 + 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return nn.Parameter(data)


def is_embedding(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """An embedding whose forward is torch's."""
    return isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward


def embedding(width: int, number: int) -> Callable[[Tensor], Tensor]:
    """A forward that needs no table: rows of `width` numbers that depend on the id and on the embedding's number."""

    def forward(ids: Tensor) -> Tensor:
        columns = torch.arange(width, dtype=torch.float64) + 1
        return torch.sin((ids[..., None].double() + 1) * 12.9898 * columns + number)

    return forward


def own_weights(model: nn.Module) -> set[str]:
    """Names of the parameters of linears and embeddings, which these use themselves."""
    own = set(_weights_of_shadowed(model))
    return {name for name, parameter in model.named_parameters() if id(parameter) in own}


def _settle(module: nn.Module, generator: torch.Generator) -> set[int]:
    """Make one module of the copy ready to run in float64 on the CPU: buffers, attention kernels, no caches.

    One that does not call all that it may call later does so where it has a method ``axonn_call_all``.
    """
    drawn: set[int] = set()
    if (call_all := getattr(module, "axonn_call_all", None)) is not None:
        call_all()
    for name, buffer in module._buffers.items():
        if buffer is not None:
            real = buffer.is_floating_point()
            value = buffer.detach().to(torch.float64 if real else buffer.dtype)
            if buffer.is_meta:
                value = torch.rand(value.shape, generator=generator, dtype=value.dtype) if real else _zeros(value)
                drawn.add(id(value))
            module._buffers[name] = value.cpu()
    config = getattr(module, "config", None)
    if getattr(config, "use_cache", None) is True:
        config.use_cache = False  # type: ignore[union-attr]
    if "flash" in str(getattr(config, "_attn_implementation", "")):
        config._attn_implementation = "sdpa"  # type: ignore[union-attr]
    if getattr(config, "_experts_implementation", None):
        config._experts_implementation = "eager"  # type: ignore[union-attr]
    return drawn


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def fresh(value: Any) -> Any:
    """A detached copy of a tensor, in the shadow's precision."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("cpu", torch.float64 if value.is_floating_point() else None, copy=True)
