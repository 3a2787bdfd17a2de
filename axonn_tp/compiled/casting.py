"""The type that layers compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def computing_dtype(tensor: Tensor) -> torch.dtype:
    """Autocast's where it is on, as torch casts; else the tensor's own."""
    if torch.is_autocast_enabled(tensor.device.type) and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(tensor.device.type)
    return tensor.dtype
