"""Communication-aware checkpointing: a recomputed forward is given what the first one communicated (000, section 7.3.2)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Lock, local
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ops, _differentiable = torch.ops._c10d_functional, torch.ops._c10d_functional_autograd
_COLLECTIVES = {
    operator.default
    for operator in (_ops.all_to_all_single, _ops.all_reduce, _ops.all_gather_into_tensor, _ops.reduce_scatter_tensor)
} | {_ops.all_gather_into_tensor_out.default}

_WAIT = _ops.wait_tensor
_SEEN = [
    *((_ops, name) for name in ("all_to_all_single", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")),
    *((_ops, name) for name in ("all_gather_into_tensor_out", "wait_tensor")),
    *((_differentiable, name) for name in ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")),
]
"""Operators that lead to these, or wait for them."""
_GATHERS = {_ops.all_gather_into_tensor.default, _ops.all_gather_into_tensor_out.default}


Place = Literal["device", "cpu"]


class Stashing:
    """A function to be checkpointed, whose collectives happen in the first call only.

    ``checkpoint(Stashing(block), x)`` in the place of ``checkpoint(block, x)``, whichever checkpoint: torch's or DeepSpeed's,
    reentrant or not, one in another. Each checkpointed call needs an object of its own. What all-to-alls, all-reduces, all-gathers and
    reduce-scatters (torch's functional ones, as `ted_moe` and `axonn_tp` use them) returned is kept until the
    recomputation asks for it.

    Args:
        function: what is checkpointed.
        stash: where results are kept: "device", or "cpu", in pinned memory if they come from an accelerator.
        leave: names of process groups whose gathers happen again, as of weights, which are begun ahead.

    Attributes:
        nbytes: bytes that are kept now.

    Raises:
        ValueError: another `stash`.
    """

    def __init__(self, function: Callable[..., Any], stash: Place = "device", leave: Collection[str] = ()) -> None:
        self.function, self._stash = function, Stash(stash, leave)
        self._autocast = Autocast()

    @property
    def nbytes(self) -> int:  # noqa: D102
        return self._stash.nbytes

    @property
    def kept(self) -> list[Tensor]:
        """The tensors that are kept now."""
        return self._stash.kept

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The function's result."""
        # In a recomputation autograd is running, whichever way it was started; so it is when a checkpoint around this one is
        # recomputed, and this one is called as if for the first time.
        again = torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
        if again and self._stash.recorded and not _replaying():
            # DeepSpeed's checkpoints leave the first call's autocast out, whose types the kept results have.
            with self._autocast.again(), self._stash.replay():
                return self.function(*arguments, **keywords)
        self._autocast = Autocast()
        with self._stash.record():
            return self.function(*arguments, **keywords)


class Autocast:
    """The present state of autocast, of the CPU and of the accelerator."""

    def __init__(self) -> None:
        accelerator = torch.accelerator.current_accelerator()
        kinds = {"cpu"} | ({accelerator.type} if accelerator is not None else set())
        self._states = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        ]
        self._cached = torch.is_autocast_cache_enabled()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore it for a while."""
        with ExitStack() as entered:
            for state in self._states:
                entered.enter_context(torch.autocast(*state, cache_enabled=self._cached))
            yield


class Stash:
    """The tensors that one call communicated, for the contexts of torch's selective checkpointing.

    ``checkpoint(block, x, use_reentrant=False, context_fn=lambda: Stash().contexts())`` does what
    ``checkpoint(Stashing(block), x)`` does.

    Args:
        place: "device", or "cpu", in pinned memory if results come from an accelerator.
        leave: see `Stashing`.

    Raises:
        ValueError: another `place`.
    """

    def __init__(self, place: Place = "device", leave: Collection[str] = ()) -> None:
        if place not in ("device", "cpu"):
            raise ValueError(f"stash = {place!r} is no place; use 'device' or 'cpu'")
        self.place, self.leave, self.spent, self.recorded = place, leave, False, False
        self._kept: list[_Kept] = []

    @property
    def kept(self) -> list[Tensor]:
        """The tensors that are kept now."""
        return [kept.tensor for kept in self._kept]

    @property
    def nbytes(self) -> int:
        """Bytes that are kept now."""
        return sum(tensor.nbytes for tensor in self.kept)

    def record(self) -> AbstractContextManager:
        """The context in which results are kept; those of an earlier call are forgotten."""
        self._kept, self.spent, self.recorded = [], False, True
        return _AroundCollectives(_Record(self._kept, self.place, self.leave))

    def replay(self) -> AbstractContextManager:
        """The context in which they are given back, once; a further recomputation communicates."""
        return _AroundCollectives(_Replay(self))

    def take(self, operator: Any) -> Tensor:
        """The next result, which is let go."""
        if not self._kept:
            raise RuntimeError(
                f"the recomputed forward calls {operator} once more than the first; let it do the same each time"
            )
        return self._kept.pop(0).take(operator)

    def spend(self) -> None:
        """From now on there is nothing to give back."""
        self._kept.clear()
        self.spent = True

    def contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """Contexts of the first forward and of the recomputation."""
        return self.record(), self.replay()


class _Kept:
    """A collective's result."""

    def __init__(self, operator: Any, tensor: Tensor) -> None:
        self.operator, self.tensor, self.device, self.version = operator, tensor, tensor.device, tensor._version

    def move(self) -> None:
        """To the host's memory."""
        if self.tensor.device.type == "cpu":
            return
        host = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, pin_memory=True)
        self.tensor = host.copy_(self.tensor, non_blocking=True)
        self.version = self.tensor._version

    def take(self, operator: Any) -> Tensor:
        if operator is not self.operator:
            raise RuntimeError(
                f"the recomputed forward calls {operator} where the first called {self.operator}; a checkpointed function "
                "must do the same each time"
            )
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"what {operator} returned was changed in place after the first forward; let the checkpointed function "
                "make a new tensor instead"
            )
        return self.tensor.to(self.device, non_blocking=True)


class _Record(TorchDispatchMode):
    def __init__(self, kept: list[_Kept], stash: str, leave: Collection[str]) -> None:
        super().__init__()
        self.kept, self.moves, self.leave = kept, stash == "cpu", leave
        self.under_way: dict[int, _Kept] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if _stashed(function, args, self.leave):
            # The result itself will have the graph's next node, which holds, in the end, this list.
            self.kept.append(_Kept(function, result.detach()))
            if self.moves:
                self.under_way[id(result)] = self.kept[-1]
        elif function is _WAIT.default and (arrived := self.under_way.pop(id(args[0]), None)) is not None:
            arrived.move()
        return result


def _stashed(function: Any, args: Any, leave: Collection[str]) -> bool:
    if function not in _COLLECTIVES:
        return False
    # Experts may be on the ranks that share a weight, and tokens on their way to them are no weights.
    return function not in _GATHERS or not any(isinstance(one, str) and one in leave for one in args)


class _Entered(local):
    """This thread's contexts.

    Attributes:
        modes: theirs, innermost last.
        calling: a collective is being called, with these on.
    """

    def __init__(self) -> None:
        self.modes: list[_Record | _Replay] = []
        self.calling = False


_entered = _Entered()


def _replaying() -> bool:
    return any(isinstance(mode, _Replay) for mode in _entered.modes)


class _Seen:
    """An operator in whose calls the modes of this thread's contexts are on.

    Around a whole block they would be asked for each of its operators, some thousand times a step.
    """

    def __init__(self, packet: Any) -> None:
        self.packet, self.waits = packet, packet is _WAIT

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A mode for torch's functions is told of this object, and calls it again.
        if torch.compiler.is_compiling() or _entered.calling:
            return self.packet(*args, **kwargs)
        with ExitStack() as on:
            for mode in _entered.modes:
                if mode.moves or not self.waits:
                    on.enter_context(mode)
            _entered.calling = True
            on.callback(setattr, _entered, "calling", False)
            return self.packet(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.packet, name)  # overloads themselves, of which torch keeps the addresses


class _AroundCollectives:
    """A context in which a mode is on while this thread calls collectives; it may be entered again."""

    _lock, _contexts = Lock(), 0

    def __init__(self, mode: _Record | _Replay) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        _entered.modes.append(self._mode)
        with self._lock:
            _AroundCollectives._contexts += 1
            if _AroundCollectives._contexts == 1:
                for space, name in _SEEN:
                    setattr(space, name, _Seen(getattr(space, name)))

    def __exit__(self, *error: object) -> None:
        _entered.modes.pop()
        with self._lock:
            _AroundCollectives._contexts -= 1
            if not _AroundCollectives._contexts:
                for space, name in _SEEN:
                    setattr(space, name, getattr(space, name).packet)
        if isinstance(self._mode, _Replay):
            # A recomputation may end before the last of them. Where backward runs again, the graph being retained, none is left.
            self._mode.stash.spend()


class _Replay(TorchDispatchMode):
    moves = False

    def __init__(self, stash: Stash) -> None:
        super().__init__()
        self.stash = stash

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.stash.spent and _stashed(function, args, self.stash.leave):
            return self.stash.take(function)
        return function(*args, **(kwargs or {}))
