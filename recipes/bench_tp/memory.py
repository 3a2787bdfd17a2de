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
        self._storages = WeakIdKeyDictionary()
        self.peak = 0

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self._alive()

    def _alive(self) -> int:
        # Sizes are read anew: FSDP frees a storage by resizing it.
        return sum(storage.nbytes() for storage in self._storages)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run, then count; a DTensor's own operators come here one by one."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter((args, result)):
            if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta:
                self._storages[tensor.untyped_storage()] = None
        self.peak = max(self.peak, self._alive())
        return result
