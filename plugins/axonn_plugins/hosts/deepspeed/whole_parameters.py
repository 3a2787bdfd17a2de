"""DeepSpeed's functions on one parameter, for parameters that are split over the grid: they give and take whole tensors.

These are the ``safe_get_full_*`` and ``safe_set_full_*`` of `deepspeed.utils` and `deepspeed.zero.GatheredParameters`. As
with ZeRO-3 every rank calls them; a call on one rank alone is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from types import FunctionType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import Tensor, nn

from axonn_plugins.optim.access import Access
from axonn_plugins.optim.flat import FlatOptimizer
from axonn_tp import Layout, Mesh, layout_of
from axonn_tp.comm.meeting import meet
from axonn_tp.layers.exports import whole_tensor

_ADVICE = "engine.save_16bit_model writes all weights"
_GIVE = ("safe_get_full_fp32_param", "safe_get_full_optimizer_state", "safe_get_full_grad")
_TAKE = ("safe_set_full_fp32_param", "safe_set_full_optimizer_state", "safe_set_full_grad")
_CHANGE = "safe_update_full_grad_vectorized"
# deepspeed.utils has a class of that name, too.
_functions: Any = import_module("deepspeed.utils.tensor_fragment")
_stock: dict[str, Callable[..., Any]] = {}


class Whole:
    """The mesh that a split parameter carries, and its layout there.

    Args:
        parameter: this rank's shard.
        mesh: the mesh.
    """

    def __init__(self, parameter: nn.Parameter, mesh: Mesh) -> None:
        self.layout, self.mesh = layout_of(parameter), mesh

    def gather(self, shard: Tensor) -> Tensor:
        """The serial tensor of one that lies like the parameter."""
        return whole_tensor(shard, self.layout, self.mesh)

    def shard(self, whole: Tensor, function: str) -> Tensor:
        """This rank's shard of the serial tensor.

        Raises:
            ValueError: it is not of the serial parameter's shape.
        """
        if whole.shape != self.layout.serial_shape:
            raise ValueError(
                f"{function} was given a tensor of shape {tuple(whole.shape)} for a parameter that is {self.layout.serial_shape}; give it the whole"
            )
        return self.layout.shard(whole.detach(), self.mesh.grid, self.mesh.coordinates)

    def meet(self, function: str) -> None:
        """All ranks are here.

        Raises:
            ValueError: they are not.
        """
        if self.mesh.size("grid") > 1:
            meet(self.mesh.group("grid"), f"{function} of a parameter that is split over ranks", _ADVICE)

    def __reduce__(self) -> NoReturn:
        """A parameter that carries this cannot be pickled, for it would be a shard.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a parameter that is split over ranks cannot be pickled, as torch.save would; save engine.module.state_dict(), which is whole"
        )


class Held:
    """The optimizer of ours that a parameter carries, where DeepSpeed's functions find its gradient, weights and states.

    Args:
        optimizer: the optimizer.
        parameter: this rank's shard.
    """

    def __init__(self, optimizer: FlatOptimizer, parameter: nn.Parameter) -> None:
        held, self.optimizer = Access(optimizer, parameter), optimizer
        self.functions: dict[str, Callable[..., Any]] = {
            "safe_get_full_grad": lambda param: held.gradient(),
            "safe_set_full_grad": lambda param, value: held.set_gradient(value),
            "safe_get_full_fp32_param": lambda param: held.weights(),
            "safe_set_full_fp32_param": lambda param, value: held.set_weights(value),
            "safe_get_full_optimizer_state": lambda param, optim_state_key: held.state(optim_state_key),
            "safe_set_full_optimizer_state": lambda param, value, optim_state_key: held.set_state(
                optim_state_key, value
            ),
        }

    def __reduce__(self) -> Any:
        """A copy of the parameter has another optimizer, or none."""
        return type(None), ()


def mark(parameters: Iterable[nn.Parameter], mesh: Mesh, optimizer: FlatOptimizer | None = None) -> None:
    """Have DeepSpeed's functions give and take these parameters whole.

    Args:
        parameters: an engine's.
        mesh: its mesh.
        optimizer: with the parameters' states, if these are ours.
    """
    trained = set() if optimizer is None else {entry.parameter for entry in optimizer.entries}
    for parameter in parameters:
        layout: Layout = layout_of(parameter)
        if layout.transposed or layout.axes - set(layout.home):
            parameter.axonn_whole = Whole(parameter, mesh.over(layout.grid))  # type: ignore[attr-defined]
        if optimizer is not None and parameter in trained:
            parameter.axonn_held = Held(optimizer, parameter)  # type: ignore[attr-defined]
    if not _stock:
        for name in (*_GIVE, *_TAKE, _CHANGE):
            _lead(name)
        _wrap_gathering()


def forget(optimizer: FlatOptimizer) -> None:
    """An optimizer is gone; parameters that another has taken since are that one's."""
    for parameter in (entry.parameter for entry in optimizer.entries):
        if getattr(getattr(parameter, "axonn_held", None), "optimizer", None) is optimizer:
            del parameter.axonn_held  # type: ignore[attr-defined]


def _led(*given: Any, _axonn: str = "", **named: Any) -> Any:
    # Its names are looked up in DeepSpeed's module.
    from axonn_plugins.hosts.deepspeed.whole_parameters import answer

    return answer(_axonn, *given, **named)


def _lead(name: str) -> None:
    """Change what a function of DeepSpeed does where it stands: scripts have imported it by name long since."""
    function: Any = getattr(_functions, name)
    stock: Any = FunctionType(function.__code__, function.__globals__, name, function.__defaults__)
    stock.__signature__ = inspect.signature(function)
    _stock[name] = stock
    function.__signature__ = stock.__signature__
    function.__code__, function.__defaults__, function.__kwdefaults__ = _led.__code__, None, {"_axonn": name}


def answer(name: str, *given: Any, **named: Any) -> Any:
    """The answer of one of DeepSpeed's functions; for a parameter that is not split, DeepSpeed's own."""
    stock: Any = _stock[name]
    arguments = stock.__signature__.bind(*given, **named).arguments
    if name == _CHANGE:
        return _update(**arguments)
    held: Held | None = getattr(arguments["param"], "axonn_held", None)
    whole: Whole | None = getattr(arguments["param"], "axonn_whole", None)
    act = stock if held is None else held.functions[name]
    if whole is None:
        return act(**arguments)
    if name in _GIVE:
        whole.meet(name)
        shard = act(**arguments)
        return None if shard is None else whole.gather(shard)
    return act(**arguments | {"value": whole.shard(arguments["value"], name)})


def _update(param_list: list[nn.Parameter], update_func: Callable[[Any, nn.Parameter], Tensor]) -> None:
    """Change gradients by a function of the whole ones."""
    get, put = _functions.safe_get_full_grad, _functions.safe_set_full_grad
    rest = [parameter for parameter in param_list if not _ours(parameter)]
    if rest:
        _stock[_CHANGE](rest, update_func)
    for parameter in param_list:
        if _ours(parameter) and parameter.requires_grad:
            put(parameter, update_func(get(parameter), parameter))


def _ours(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "axonn_whole") or getattr(parameter, "axonn_held", None) is not None


class Gathered:
    """The effect of `GatheredParameters` on parameters that are split over the grid.

    Args:
        parameters: those that were named.
        modifier: the rank whose changes are kept; None where there are none.
    """

    def __init__(self, parameters: list[Any], modifier: int | None) -> None:
        split = {id(p): p for p in parameters if hasattr(p, "axonn_whole")}
        self.parameters, self.modifier = list(split.values()), modifier
        self._shards: list[Tensor] = []

    def enter(self) -> None:
        """Make the parameters whole."""
        for parameter in self.parameters:
            parameter.axonn_whole.meet("GatheredParameters")
            self._shards.append(parameter.data)
            parameter.data = parameter.axonn_whole.gather(parameter.data)

    def leave(self, failed: bool) -> None:
        """Make them shards again, of what the modifier has.

        Raises:
            ValueError: one was changed, and there is no modifier; on every rank.
        """
        changed = torch.zeros((), dtype=torch.int32)
        for parameter, shard in zip(self.parameters, self._shards, strict=True):
            held, parameter.data = parameter.data, shard
            if failed:
                continue
            whole: Whole = parameter.axonn_whole
            changed = changed.to(shard.device)
            if self.modifier is not None:
                dist.broadcast(held, src=self.modifier, group=whole.mesh.group("grid"))
            new = whole.shard(held, "GatheredParameters")
            if self.modifier is not None:
                shard.copy_(new)
                torch.autograd.graph.increment_version(parameter)  # an optimizer of ours looks at it
            elif new.view(torch.uint8).ne(shard.contiguous().view(torch.uint8)).any():
                changed += 1
        self._shards.clear()
        if not failed and self.parameters and self.modifier is None:
            dist.all_reduce(changed, group=self.parameters[0].axonn_whole.mesh.group("grid"))
            if changed:
                raise ValueError(
                    "a parameter was changed inside GatheredParameters, which keeps that only with modifier_rank; name the rank whose values "
                    "all shall have"
                )


def _wrap_gathering() -> None:
    stock: Any = {name: getattr(GatheredParameters, name) for name in ("__init__", "__enter__", "__exit__")}

    def __init__(
        self: Any, params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
    ) -> None:
        several = isinstance(params, Iterable) and not isinstance(params, Tensor)
        params = list(params) if several else [params]
        stock["__init__"](self, params, modifier_rank, fwd_module, enabled)
        self._axonn = Gathered(params if enabled else [], modifier_rank)

    def __enter__(self: Any) -> Any:
        entered = stock["__enter__"](self)
        if hasattr(self, "_axonn"):  # it was not made before us
            self._axonn.enter()
        return entered

    def __exit__(self: Any, *exc: Any) -> Any:
        try:
            if hasattr(self, "_axonn"):
                self._axonn.leave(failed=bool(exc) and exc[0] is not None)
        finally:
            left = stock["__exit__"](self, *exc)
        return left

    for wrapped in (__init__, __enter__, __exit__):
        setattr(GatheredParameters, wrapped.__name__, wrapped)
