"""Activation checkpointing, torch's and DeepSpeed's, whose recomputation is given what the first forward communicated.

Scripts may have imported `checkpoint` under any name, so it is what all of them end in that is exchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch.utils.checkpoint as of_torch
from deepspeed.runtime.activation_checkpointing import checkpointing as of_deepspeed

from axonn_tp import Mesh
from axonn_tp.context.recomputed import exchange_function
from ted_moe import Stash, Stashing
from ted_moe.stash import Place

_active: list[Stashes] = []


class Stashes:
    """Where an engine's checkpointed blocks keep what they communicated.

    Args:
        place: "device" or "cpu".
    """

    def __init__(self, place: Place) -> None:
        _exchange()
        self.place = place
        self.leave: tuple[str, ...] = ()
        self._live: weakref.WeakSet[Any] = weakref.WeakSet()

    def leave_weights(self, mesh: Mesh) -> None:
        """Have weights gathered again: over z that is ahead of their layers, in another order in a recomputation."""
        self.leave = (mesh.group("z").group_name,) if mesh.size("z") > 1 else ()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While a model's forward runs, or a part of it again."""
        _active.append(self)
        try:
            yield
        finally:
            _active.pop()

    @property
    def nbytes(self) -> int:
        """Bytes kept now; what checkpoints in each other keep is the same tensors."""
        return sum({tensor.data_ptr(): tensor.nbytes for stash in self._live for tensor in stash.kept}.values())

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of a checkpoint."""
        stashing = Stashing(function, self.place, self.leave)
        self._live.add(stashing)
        return stashing

    def wrap_reentrant(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of a reentrant checkpoint: those in it are new ones when it is called again, and recomputed later."""

        def recorded(*arguments: Any) -> Any:
            with self.recording():
                return function(*arguments)

        return self.wrap(recorded)

    def contexts(self) -> tuple[Any, Any]:
        """Contexts of a checkpoint that is not reentrant; torch keeps them as long as the recomputation may come."""
        stash = Stash(self.place, self.leave)
        first, again = stash.contexts()
        self._live.add(stash)
        return first, again


def _exchange() -> None:
    if getattr(of_torch, "axonn", False):
        return
    of_torch.axonn = True  # type: ignore[attr-defined]
    for function in (of_torch.CheckpointFunction, of_deepspeed.CheckpointFunction):
        function.forward = staticmethod(_stashing_forward(function.forward))  # type: ignore[method-assign]
    exchange_function(
        of_deepspeed.non_reentrant_checkpoint,
        lambda function: _active[-1].wrap(function) if _active else function,
    )
    of_torch._checkpoint_without_reentrant_generator = _stashing_generator(
        of_torch._checkpoint_without_reentrant_generator
    )


def _stashing_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(ctx: Any, run_function: Callable[..., Any], *rest: Any) -> Any:
        return original(ctx, _active[-1].wrap_reentrant(run_function) if _active else run_function, *rest)

    return forward


def _stashing_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    def generator(
        fn: Callable[..., Any],
        preserve_rng_state: bool = True,
        context_fn: Callable[[], tuple[Any, Any]] = of_torch.noop_context_fn,
        *rest: Any,
        **keywords: Any,
    ) -> Any:
        contexts = context_fn
        if _active:
            stashes = _active[-1]

            def contexts() -> tuple[Any, Any]:
                return tuple(_Both(*pair) for pair in zip(context_fn(), stashes.contexts(), strict=True))  # type: ignore[return-value]

        return original(fn, preserve_rng_state, contexts, *rest, **keywords)

    return generator


class _Both:
    """Two contexts in one that, as each of them, can be entered again: backward may run twice."""

    def __init__(self, outer: AbstractContextManager, inner: AbstractContextManager) -> None:
        self._pair, self._entered = (outer, inner), ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as entered:
            for context in self._pair:
                entered.enter_context(context)
            self._entered = entered.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)
