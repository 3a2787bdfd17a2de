"""Which modules of a model are alike: of one structure, and equal in all that they hold and their forward ever reads.

Repeated blocks differ in something, such as a `layer_idx` that only a cache would ask for. What differs between blocks
of one structure is watched while they run: blocks that differ in what none of them reads are alike, others are not.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)
# nn.Module's own: tables that are compared one by one, and hooks, which no block may have.
_OWN = {name for name in vars(nn.Module()) if name not in ("training",)} | {"forward"}


def plain(value: Any, owner: object = None) -> Hashable:
    """A key by which two values are equal: numbers, words and collections of them by value, most else as itself.

    Args:
        value: any.
        owner: whose attribute it is; a method of its own is the same as that of another one.
    """
    if type(value) in _PLAIN:
        return type(value), value
    if type(value) in (tuple, list):
        return type(value), tuple(plain(held, owner) for held in value)
    if type(value) in (set, frozenset):
        return type(value), frozenset(plain(held, owner) for held in value)
    if type(value) is dict:
        return dict, tuple((plain(key, owner), plain(held, owner)) for key, held in value.items())
    if type(value) is partial:
        return partial, plain(value.func, owner), plain(value.args, owner), plain(value.keywords, owner)
    if type(value) is MethodType and value.__self__ is owner:
        return MethodType, id(value.__func__)
    return "itself", id(value)


def digest(tensor: Tensor) -> Hashable:
    """A tensor's type, shape and values in few bytes."""
    if tensor.layout is not torch.strided:
        return "itself", id(tensor)
    held = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return tensor.dtype, tuple(tensor.shape), hashlib.sha256(held.data).digest()


def has_hooks(module: nn.Module) -> bool:
    """True if something else runs when the module is called."""
    return any(
        getattr(module, f"_{kind}")
        for kind in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    )


class Likeness:
    """The repeated blocks of a model.

    Args:
        modules: of the model, by name.
        answering: ids of the modules whose forward is not their own in passes.
        drawn: ids of buffers whose values mean nothing.

    Attributes:
        kinds: by name of a block, a number for its structure, which another block has too. No block lies in another one.
    """

    def __init__(self, modules: Mapping[str, nn.Module], answering: Collection[int], drawn: Collection[int]) -> None:
        self._modules, self._answering, self._drawn = modules, answering, drawn
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[int, int] = {}
        root = modules[""]
        self._places = Counter(id(m) for _, m in root.named_modules(remove_duplicate=False))
        self._holders = Counter(id(p) for m in modules.values() for p in m._parameters.values() if p is not None)
        count = Counter(self._structure(module) for module in modules.values())
        self.kinds = dict(self._blocks("", count))
        self._differing: dict[int, dict[tuple[str, str], bool]] = {}
        self._watched: dict[tuple[int, str], tuple[int, str]] = {}
        self._inside: int | None = None
        members: dict[int, list[str]] = defaultdict(list)
        for name, kind in self.kinds.items():
            members[kind].append(name)
        for kind, names in members.items():
            self._compare(kind, names)

    def _blocks(self, name: str, count: Mapping[int, int]) -> Iterator[tuple[str, int]]:
        """The outermost modules that others equal and that answer for linears."""
        for child, module in self._modules[name].named_children():
            inner = f"{name}.{child}" if name else child
            if self._modules.get(inner) is not module:  # another name of a module
                continue
            kind = self._structure(module)
            own_forward = type(module).forward is not nn.Module.forward
            if kind and count[kind] > 1 and own_forward and self._answers(module) and id(module) not in self._answering:
                yield inner, kind
            else:
                yield from self._blocks(inner, count)

    def _answers(self, module: nn.Module) -> bool:
        return any(id(m) in self._answering for m in module.modules())

    def _structure(self, module: nn.Module) -> int:
        """A number that modules of one structure share, 0 for one that cannot be like another."""
        if id(module) not in self._known:
            self._known[id(module)] = self._numbered(module)
        return self._known[id(module)]

    def _numbered(self, module: nn.Module) -> int:
        if self._places[id(module)] > 1:
            # Where it holds nothing that is watched by name, it is the same for everybody who uses it.
            held = any(True for _ in module.parameters()) or self._answers(module)
            return 0 if held else self._number(("itself", id(module)))
        own_forward = "forward" in vars(module) and id(module) not in self._answering
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        shared = any(self._holders[id(p)] > 1 for p in parameters.values())
        if own_forward or shared or has_hooks(module) or getattr(module, "axonn_boundary", False):
            return 0
        children = tuple((name, self._structure(child)) for name, child in module.named_children())
        if not all(kind for _, kind in children):
            return 0
        return self._number(
            (
                type(module),
                module.training,
                tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in parameters.items()),
                tuple((n, self._held(b)) for n, b in module._buffers.items() if b is not None),
                children,
            )
        )

    def _held(self, buffer: Tensor) -> Hashable:
        return (buffer.dtype, tuple(buffer.shape)) if id(buffer) in self._drawn else digest(buffer)

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def inside(self, name: str) -> dict[str, nn.Module]:
        """The modules of a block, by their names in it."""
        return dict(self._modules[name].named_modules())

    def attributes(self, name: str) -> dict[tuple[str, str], Hashable]:
        """The attributes of a block's modules besides tensors and modules, by (module, attribute)."""
        return {
            (inner, attribute): plain(value, module)
            for inner, module in self.inside(name).items()
            for attribute, value in vars(module).items()
            if attribute not in _OWN
        }

    def _compare(self, kind: int, names: list[str]) -> None:
        found = [self.attributes(name) for name in names]
        keys = {key: None for attributes in found for key in attributes}
        differ = [key for key in keys if len({attributes.get(key) for attributes in found}) > 1]
        # What its class has under that name cannot be watched: it counts as read.
        self._differing[kind] = {
            (inner, attribute): hasattr(type(self.inside(names[0])[inner]), attribute) for inner, attribute in differ
        }
        for name in names:
            modules = self.inside(name)
            for inner, attribute in differ:
                self._watched[id(modules[inner]), attribute] = kind, inner

    def read(self, name: str) -> Hashable:
        """The values of what differs and was read, so far, in blocks of this one's structure."""
        attributes = self.attributes(name)
        return tuple((key, attributes.get(key)) for key, read in self._differing[self.kinds[name]].items() if read)

    @property
    def reads(self) -> int:
        """Number of reads so far of attributes that differ."""
        return sum(sum(differing.values()) for differing in self._differing.values())

    def _note(self, module: nn.Module, attribute: str) -> None:
        found = self._watched.get((id(module), attribute))
        if found is not None and self._inside is not None:
            kind, inner = found
            self._differing[kind][inner, attribute] = True

    @contextmanager
    def running(self, block: str | None) -> Iterator[None]:
        """Inside, a block runs; what is read then, of this or any other block, counts as read."""
        before, self._inside = self._inside, self._inside if block is None else self.kinds[block]
        try:
            yield
        finally:
            self._inside = before

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, reads of what differs are seen."""
        classes = {
            (type(module), attribute)
            for name, kind in self.kinds.items()
            for inner, module in self.inside(name).items()
            for (place, attribute), read in self._differing[kind].items()
            if place == inner and not read
        }
        for owner, attribute in classes:
            setattr(owner, attribute, _Watched(attribute, self._note))
        try:
            yield
        finally:
            for owner, attribute in classes:
                delattr(owner, attribute)


class _Watched:
    """In a class, stands before an attribute of its instances and tells who reads it."""

    def __init__(self, name: str, note: Callable[[nn.Module, str], None]) -> None:
        self._name, self._note = name, note

    def __get__(self, instance: nn.Module | None, owner: type) -> Any:
        if instance is not None:
            self._note(instance, self._name)
            if self._name in vars(instance):
                return vars(instance)[self._name]
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")

    def __set__(self, instance: nn.Module, value: Any) -> None:
        vars(instance)[self._name] = value

    def __delete__(self, instance: nn.Module) -> None:
        del vars(instance)[self._name]
