"""Peak memory of what runs, counted tensor by tensor: the same on every device, and free of allocators' rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary


class PeakMemory(TorchDispatchMode):
    """A context that follows every storage made within it until it is freed.

    Enter it again to go on; what was made before is still followed.

    Attributes:
        peak: most bytes that were alive at once since `restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes = WeakIdKeyDictionary()
        # At least what is alive: nobody says when a storage is freed or, as FSDP does, resized to nothing.
        self._bound = 0
        self.peak = 0

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self._bound = self._alive()

    def _alive(self) -> int:
        for storage in list(self._sizes):
            self._sizes[storage] = storage.nbytes()
        return sum(self._sizes.values())

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._bound += max(0, size - self._sizes.get(storage, 0))
        self._sizes[storage] = size

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run, then count; a DTensor's own operators come here one by one."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter((args, result)):
            if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta:
                self._see(tensor)
        if self._bound > self.peak:
            self._bound = self._alive()
            self.peak = max(self.peak, self._bound)
        return result
