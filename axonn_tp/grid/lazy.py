"""Tensors that are still in a file: known by shape and dtype, read when they are needed, and as much of them as is needed.

A model whose parameters are such tensors takes no memory; `axonn_tp.parallelize` reads this rank's part of each. Other
code that uses one finds the whole tensor, read at its first use. While tensors are renamed, joined and cut (`recording`),
nothing is read at all: what is made of them is remembered and done when it is asked for.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

Cut = tuple[slice, ...]
_aten: Any = torch.ops.aten
_SAME = (_aten.detach, _aten.alias, _aten.lift_fresh)
_NO_VALUES = tuple(
    getattr(_aten, f"{kind}_like") for kind in ("empty", "zeros", "ones", "full", "rand", "randn")
) + tuple(getattr(_aten, f"new_{kind}") for kind in ("empty", "empty_strided", "zeros", "ones", "full"))
_recording = 0
_latest: list[Any] = [None, None]
"""The source and the whole of the last tensor that had to be computed for a rectangle of it."""


@contextmanager
def recording() -> Iterator[None]:
    """Inside, operations on lazy tensors give lazy tensors."""
    global _recording
    _recording += 1
    try:
        yield
    finally:
        _recording -= 1


def forget() -> None:
    """Let go of what rectangles of the last tensor were read of."""
    _latest[:] = [None, None]


class Source:
    """Where a lazy tensor's values come from; copies and other views of the tensor share it.

    Args:
        read: gives the values, or those of a rectangle of them.
        origin: what is read, in words: where it is equal, so are values.

    Attributes:
        held: the values, once they are in memory.
    """

    def __init__(self, read: Callable[[Cut | None], Tensor], origin: str) -> None:
        self._read, self.origin = read, origin
        self.held: Tensor | None = None

    def read(self, cut: Cut | None = None) -> Tensor:
        """The values, or those of a rectangle."""
        if self.held is None:
            return self._read(cut)
        return self.held if cut is None else self.held[cut]

    def copy(self) -> Source:
        """The values as they are now, whatever is done to these later."""
        made = Source(self._read, self.origin)
        made.held = None if self.held is None else self.held.clone()
        return made

    def hold(self) -> Tensor:
        """The values, which from now on are in memory and may be changed."""
        if self.held is None:
            self.held = self._read(None)
        return self.held


class LazyTensor(Tensor):
    """A tensor on the CPU whose values are read when they are needed.

    Args:
        like: of its shape, strides and dtype; on the meta device.
        source: its values.
    """

    source: Source
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: Tensor, source: Source) -> LazyTensor:  # noqa: D102
        made: Any = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
        )
        made.source = source
        return made

    def __init__(self, like: Tensor, source: Source) -> None:
        pass

    @property
    def unread(self) -> int:
        """A number that is equal on ranks that would read the same; 0 where the values are in memory."""
        return 0 if self.source.held is not None else 1 + zlib.crc32(self.source.origin.encode())

    def turn_into(self, real: Tensor) -> None:
        """Become a plain tensor, in place: a parameter stays the same object, which an optimizer may hold."""
        fresh: Tensor = nn.Parameter(real.detach(), self.requires_grad) if isinstance(self, nn.Parameter) else real
        fresh.__dict__.update({key: v for key, v in self.__dict__.items() if key not in ("source", "_is_param")})
        torch.utils.swap_tensors(self, fresh)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The tensor without its history; what is assigned to it takes its place."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, LazyTensor):
            self.turn_into(value)
            return
        fresh = LazyTensor(_bare(value), value.source).requires_grad_(self.requires_grad)
        fresh.__dict__.update({key: v for key, v in self.__dict__.items() if key != "source"})
        torch.utils.swap_tensors(self, fresh)

    def untyped_storage(self) -> torch.UntypedStorage:  # noqa: D102
        return self.source.hold().untyped_storage()

    def data_ptr(self) -> int:  # noqa: D102
        return self.source.hold().data_ptr()

    def tolist(self) -> Any:  # noqa: D102
        return self.source.hold().tolist()

    def numpy(self, *, force: bool = False) -> Any:  # noqa: D102
        return self.source.hold().numpy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied = LazyTensor(_bare(self), self.source.copy()).requires_grad_(self.requires_grad)
            copied.__dict__.update({key: v for key, v in self.__dict__.items() if key != "source"})
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole = self.source.read()
        return (nn.Parameter(whole, self.requires_grad) if isinstance(self, nn.Parameter) else whole).__reduce_ex__(
            protocol
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor({tuple(self.shape)}, {self.dtype}, {self.source.origin})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Read, or remember what is to be done."""
        kwargs, packet = kwargs or {}, func.overloadpacket
        if packet in _SAME:
            return LazyTensor(_bare(args[0]), args[0].source)
        if packet in _NO_VALUES:
            return func(*tree_map(_empty, args), **kwargs)
        if packet is _aten._to_copy and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            return _cast(args[0], kwargs.get("dtype") or args[0].dtype)
        if packet is _aten.equal:
            return func(*tree_map(whole, args), **kwargs)
        if _recording and not func._schema.is_mutable:
            recorded = _recorded(func, args, kwargs)
            if recorded is not None:
                return recorded
        return _done(func, args, kwargs)


def whole(tensor: Tensor) -> Tensor:
    """A tensor's values, which a lazy tensor does not keep."""
    return tensor.source.read() if isinstance(tensor, LazyTensor) else tensor


def _bare(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _empty(value: Any) -> Any:
    return torch.empty_like(_bare(value), device="cpu") if isinstance(value, LazyTensor) else value


def _cast(tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    source = tensor.source.copy()
    made = Source(lambda cut: source.read(cut).to(dtype), f"{source.origin} as {dtype}")
    made.held = None if source.held is None else source.held.to(dtype)
    return LazyTensor(_bare(tensor).to(dtype), made)


def _recorded(func: Any, args: tuple, kwargs: dict) -> Any:
    """Lazy tensors of what an operation gives; None where it gives something else."""
    made = func(*tree_map(lambda v: _bare(v) if isinstance(v, LazyTensor) else v, args), **kwargs)
    several, packet = isinstance(made, (list, tuple)), func.overloadpacket
    if not all(isinstance(one, Tensor) and one.is_meta for one in (made if several else [made])):
        return None
    inputs = [v.source.origin if isinstance(v, LazyTensor) else str(v) for v in tree_leaves((args, kwargs))]
    origin = f"{func} of {zlib.crc32(' '.join(inputs).encode()):08x}"

    def source(number: int | None) -> Source:
        def compute() -> Tensor:
            with torch.no_grad():
                result = func(*tree_map(whole, args), **kwargs)
            return result if number is None else result[number]

        def read(cut: Cut | None) -> Tensor:
            if cut is not None and packet in (_aten.cat, _aten.stack):
                return _joined(args, packet is _aten.stack, cut, made.dim())
            # The rectangles of one tensor are read one after the other.
            if _latest[0] is not compute:
                forget()
                result = compute()
                if cut is None:
                    return result
                _latest[:] = [compute, result]
            result = _latest[1]
            if cut is None:  # whoever has all of it may change it
                forget()
            return result if cut is None else result[cut]

        return Source(read, origin if number is None else f"{origin}[{number}]")

    if several:
        return [LazyTensor(one, source(number)) for number, one in enumerate(made)]
    return LazyTensor(made, source(None))


def _joined(args: tuple, stacked: bool, cut: Cut, dims: int) -> Tensor:
    """A rectangle of tensors one after the other, of which no more is read."""
    tensors, dim = args[0], (args[1] if len(args) > 1 else 0) % dims
    pieces, begin = [], 0
    for tensor in tensors:
        end = begin + (1 if stacked else tensor.shape[dim])
        low, high = max(cut[dim].start, begin), min(cut[dim].stop, end)
        if low < high:
            inner = (*cut[:dim], *([] if stacked else [slice(low - begin, high - begin)]), *cut[dim + 1 :])
            piece = tensor.source.read(inner) if isinstance(tensor, LazyTensor) else tensor[inner]
            pieces.append(piece.unsqueeze(dim) if stacked else piece)
        begin = end
    return torch.cat(pieces, dim)


def _done(func: Any, args: tuple, kwargs: dict) -> Any:
    """Apply an operation to the values; returns its result, or where it changes a lazy tensor, that tensor."""
    lazy = {id(v.source.hold()): v for v in tree_leaves((args, kwargs)) if isinstance(v, LazyTensor)}
    given, named = tree_map(lambda v: v.source.hold() if isinstance(v, LazyTensor) else v, (args, kwargs))
    return tree_map(lambda value: lazy.get(id(value), value), func(*given, **named))
