"""Parameters by name, from whatever torch's optimizers take."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


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


def named_groups(params: nn.Module | Iterable[Any]) -> tuple[list[dict[str, Any]], dict[nn.Parameter, str]]:
    """Torch's parameter groups without names, and names: those given, or numbers."""
    given: list[Any] = list(params.named_parameters() if isinstance(params, nn.Module) else params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    names: dict[nn.Parameter, str] = {}
    plain = []
    for group in groups:
        members = group["params"]
        members = list(members.named_parameters()) if isinstance(members, nn.Module) else members
        members = [members] if isinstance(members, Tensor) else list(members)
        found = []
        for member in members:
            name, parameter = member if isinstance(member, tuple) else (str(len(names)), member)
            names[parameter] = name
            found.append(parameter)
        plain.append({**group, "params": found})
    return plain, names
