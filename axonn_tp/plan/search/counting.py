"""Counts of a shadow's modules while it runs as a share (`axonn_tp.plan.counted_attributes`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from axonn_tp.layers.as_share import AsShare, argument, end, given_for, shaped
from axonn_tp.plan.counted_attributes import divide
from axonn_tp.plan.search.runs import Cut, Local, Mismatch, Run


@contextmanager
def local_counts(
    modules: Mapping[str, nn.Module],
    sizes: Mapping[str, tuple[int, int]],
    run: Run,
    cuts: Mapping[str, Cut],
    counts: Iterable[Local],
) -> Iterator[None]:
    """Inside, modules find a share's counts.

    Args:
        modules: of the shadow, by name.
        sizes: (in, out) features of its linears, by name.
        run: a whole pass.
        cuts: layers as one share.
        counts: of which modules, and which.

    Raises:
        Mismatch: features do not divide.
    """
    with ExitStack() as stack:
        for local in counts:
            module = modules[local.module]
            for name, value in divide(module, local.names, local.shares):
                stack.callback(setattr, module, name, value)
            if any(map(argument, local.names)):
                normal = (n for n in sizes if n in cuts and n.rpartition(".")[0] == local.module)
                width = next(sizes[n][0] for n in normal if cuts[n].parts is not None)
                if width % local.shares:
                    raise Mismatch(f"{width} features do not divide by {local.shares}")
                _tell(stack, module, local.names, width // local.shares, run.arguments.get(local.module))
        yield


def _tell(stack: ExitStack, module: nn.Module, names: Iterable[str], width: int, whole: Any) -> None:
    """Have arguments of a module tell a share's features, and the tokens that they have in a whole pass."""
    wholes: dict[str, int | None] = {}
    for name in filter(None, map(argument, names)):
        given = None if whole is None else given_for(module, name, *whole)[1]
        wholes[name] = given.shape[-2] if isinstance(given, Tensor) and given.dim() > 1 else None
    running: list[list[AsShare]] = []

    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        args, kwargs, made = shaped(module, names, args, kwargs, width, wholes)
        running.append(made)
        return args, kwargs

    stack.callback(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(lambda *_: end(running.pop()), always_call=True).remove)
