"""In a simulated pass blocks that are alike are run once: the others answer as the first one did, relative to the whole.

A block repeats the answer of another one only where it is like it (`axonn_tp.plan.search.alike`), is cut like it, and is
given in this pass, of what it was given in the whole one, the same part as the other: so the other's answer, the same
part of what the whole pass returned, is its answer too. Blocks that do more than turn arguments into results, draw
random numbers, or change what they are given, are always run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from axonn_tp.plan.search.alike import Likeness, digest, has_hooks, plain


class Related(Protocol):
    """A pass on shares, as blocks see it."""

    def part(self, got: Tensor, whole: Tensor) -> Hashable:
        """Which part of the whole pass' tensor this one is, and what it was made of; nothing where it is no part."""

    def entering(self, tensor: Tensor, part: Hashable) -> Tensor:
        """The tensor that a block is given in the place of another."""

    def answer(self, whole: Tensor, part: Hashable) -> Tensor:
        """The part of what the whole pass returned."""

    def repeated(self, first: str, name: str, calls: Mapping[str, int]) -> None:
        """The block `name` answered as `first` did; its layers, by their names in it, count as called."""


@dataclass
class Call:
    """The one call of a block in a whole pass.

    Attributes:
        arguments: its leaves, tensors detached.
        form: the tree of the arguments.
        results: leaves of what it returned.
        result_form: their tree.
        passed: by result, the argument that it is.
        calls: of the layers inside, by their names in it.
        likeness: equal for blocks that are alike and were called alike.
    """

    arguments: list[Any]
    form: Any
    results: list[Any]
    result_form: Any
    passed: dict[int, int]
    calls: dict[str, int]
    likeness: Hashable = None


def _is_known(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return type(leaf) is Tensor and leaf.layout is torch.strided and leaf.device.type == "cpu"
    return plain(leaf)[0] != "itself"  # type: ignore[index]


def _kept(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


class Recorder:
    """Takes down what blocks are given and return in a whole pass.

    Args:
        likeness: of the model's modules.
        results: by layer, its answers so far.
    """

    def __init__(self, likeness: Likeness, results: Mapping[str, list[Tensor]]) -> None:
        self._likeness, self._results = likeness, results
        self._calls: dict[str, Call | None] = {}
        self._before = {name: likeness.attributes(name) for name in likeness.kinds}

    def _counts(self, name: str) -> dict[str, int]:
        names = self._likeness.inside(name)
        return {inner: len(calls) for inner in names if (calls := self._results.get(f"{name}.{inner}"))}

    def __call__(self, name: str, forward: Callable[..., Any], arguments: tuple) -> Any:
        """One call of a block."""
        leaves, form = tree_flatten(arguments)
        if name in self._calls or not all(map(_is_known, leaves)):
            self._calls[name] = None
            return forward(*arguments[0], **arguments[1])
        kept, state = list(map(_kept, leaves)), self._state(name, leaves)
        began = self._counts(name)
        outputs = forward(*arguments[0], **arguments[1])
        results, result_form = tree_flatten(outputs)
        after, after_form = tree_flatten(arguments)
        same_leaves = form == after_form and all(a is b for a, b in zip(leaves, after, strict=True))
        passed = {j: i for j, r in enumerate(results) for i, a in enumerate(leaves) if r is a and isinstance(r, Tensor)}
        fine = (
            not began
            and same_leaves
            and all(map(_is_known, results))
            and torch.equal(state[0], torch.get_rng_state())
            and state[1:] == self._state(name, leaves)[1:]
            and not _overlap(leaves, results, passed)
        )
        self._calls[name] = None
        if fine:
            self._calls[name] = Call(kept, form, list(map(_kept, results)), result_form, passed, self._counts(name))
        return outputs

    def _state(self, name: str, leaves: list[Any]) -> tuple[Tensor, list[int], list[int]]:
        modules = self._likeness.inside(name).values()
        held = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        given = [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
        return torch.get_rng_state(), given, [tensor._version for tensor in held]

    def blocks(self) -> dict[str, Call]:
        """The blocks that may answer as others do, after the pass."""
        found = {}
        for name, call in self._calls.items():
            inner = [module for inside, module in self._likeness.inside(name).items() if inside]
            if (
                call is not None
                and call.calls == self._counts(name)
                and self._before[name] == self._likeness.attributes(name)
                and not any(map(has_hooks, inner))
            ):
                call.likeness = self._compared(name, call)
                found[name] = call
        return found

    def _compared(self, name: str, call: Call) -> Hashable:
        return (
            self._likeness.kinds[name],
            self._likeness.read(name),
            (str(call.form), tuple(map(_described, call.arguments))),
            (str(call.result_form), tuple(map(_shape, call.results))),
            (tuple(call.passed.items()), tuple(call.calls.items())),
        )


def _described(leaf: Any) -> Hashable:
    """An activation's shape, and the value of everything else."""
    return digest(leaf) if isinstance(leaf, Tensor) and not leaf.requires_grad else _shape(leaf)


def _shape(leaf: Any) -> Hashable:
    return (leaf.dtype, tuple(leaf.shape), leaf.requires_grad) if isinstance(leaf, Tensor) else plain(leaf)


def _overlap(arguments: list[Any], results: list[Any], passed: Mapping[int, int]) -> bool:
    """True if a result shares memory with another tensor, without being that very argument."""
    taken = {_memory(leaf) for leaf in arguments if isinstance(leaf, Tensor)}
    for number, result in enumerate(results):
        if isinstance(result, Tensor) and number not in passed:
            if _memory(result) in taken:
                return True
            taken.add(_memory(result))
    return False


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Replay:
    """One pass on shares in which blocks that are alike are run once.

    Args:
        likeness: of the model's modules.
        blocks: their calls in the whole pass.
        related: the pass.
        cuts: by layer, how it is cut, and by module, how it counts.
    """

    def __init__(
        self, likeness: Likeness, blocks: Mapping[str, Call], related: Related, cuts: Iterable[tuple[str, Hashable]]
    ) -> None:
        self._likeness, self._blocks, self._related = likeness, blocks, related
        self._first: dict[Hashable, tuple[str, list[Hashable]] | None] = {}
        self._seen: set[str] = set()
        self._cuts: dict[str, list[tuple[str, Hashable]]] = {name: [] for name in blocks}
        for name, cut in cuts:
            block = containing(name, blocks)
            if block is not None:
                self._cuts[block].append((name[len(block) :], cut))
        self.repeated: Counter[str] = Counter()

    def __call__(self, name: str, forward: Callable[..., Any], arguments: tuple) -> Any:
        """One call of a block: run, or answered as one like it was."""
        call = self._blocks.get(name)
        leaves, form = tree_flatten(arguments)
        parts = self._parts(call, leaves, form) if call is not None and name not in self._seen else None
        self._seen.add(name)
        if call is None or parts is None:
            return forward(*arguments[0], **arguments[1])
        key = (call.likeness, tuple(self._cuts[name]), tuple(parts))
        if key in self._first:
            known = self._first[key]
            return forward(*arguments[0], **arguments[1]) if known is None else self._answer(name, call, leaves, *known)
        entering = [
            self._related.entering(leaf, part) if isinstance(leaf, Tensor) else leaf
            for leaf, part in zip(leaves, parts, strict=True)
        ]
        positional, named = tree_unflatten(entering, form)
        outputs = forward(*positional, **named)
        found = self._answered(call, entering, outputs)
        self._first[key] = None if found is None else (name, found)
        return outputs

    def _parts(self, call: Call, leaves: list[Any], form: Any) -> list[Hashable] | None:
        if form != call.form:
            return None
        parts: list[Hashable] = []
        for leaf, whole in zip(leaves, call.arguments, strict=True):
            if not isinstance(leaf, Tensor):
                if isinstance(whole, Tensor) or plain(leaf) != plain(whole):
                    return None
                parts.append(None)
                continue
            part = self._related.part(leaf, whole) if isinstance(whole, Tensor) else None
            if part is None:
                return None
            parts.append(part)
        return parts

    def _answered(self, call: Call, entering: list[Any], outputs: Any) -> list[Hashable] | None:
        """The parts that a block returned of what it returned in the whole pass; nothing where others cannot do so."""
        results, form = tree_flatten(outputs)
        passed = {
            j: i for j, r in enumerate(results) for i, a in enumerate(entering) if r is a and isinstance(r, Tensor)
        }
        if form != call.result_form or passed != call.passed:
            return None
        parts: list[Hashable] = []
        for result, whole in zip(results, call.results, strict=True):
            if isinstance(result, Tensor) != isinstance(whole, Tensor):
                return None
            part = self._related.part(result, whole) if isinstance(result, Tensor) else None
            if part is None and (isinstance(result, Tensor) or plain(result) != plain(whole)):
                return None
            parts.append(part)
        return parts

    def _answer(self, name: str, call: Call, leaves: list[Any], first: str, parts: list[Hashable]) -> Any:
        self._related.repeated(first, name, call.calls)
        self.repeated[first] += 1
        results = [
            leaves[call.passed[number]]
            if number in call.passed
            else self._related.answer(whole, part)
            if isinstance(whole, Tensor)
            else whole
            for number, (whole, part) in enumerate(zip(call.results, parts, strict=True))
        ]
        return tree_unflatten(results, call.result_form)


def containing(name: str, blocks: Mapping[str, Any]) -> str | None:
    """The block that a module lies in, or is."""
    while name:
        if name in blocks:
            return name
        name = name.rpartition(".")[0]
    return None
