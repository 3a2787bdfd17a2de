"""Masks and parameters, by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch
from torch import Tensor


def check_masks(masks: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Refuse masks that do not fit.

    Raises:
        ValueError: a mask of no parameter, of another shape, or not of booleans.
    """
    for name, mask in masks.items():
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"masks name {name!r}, which is no parameter of this optimizer{hint}")
        shape = tuple(parameters[name].shape)
        if tuple(mask.shape) != shape or mask.dtype != torch.bool:
            raise ValueError(
                f"the mask of {name!r} is {mask.dtype} of shape {tuple(mask.shape)}; it must be torch.bool of the "
                f"parameter's shape {shape}"
            )
