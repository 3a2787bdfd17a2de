"""Parameters by name, from whatever torch's optimizers take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


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


def check_shares(stage: int, grouped: bool, tile_size: int, gather_ahead: bool) -> None:
    """Refuse what no optimizer on flat stores can do.

    Args:
        stage: what ranks share.
        grouped: whether there are ranks to share among.
        tile_size: elements updated at a time.
        gather_ahead: whether weights are gathered while the next forward pass runs.

    Raises:
        ValueError: always, then.
    """
    if tile_size < 1:
        raise ValueError(f"tile_size = {tile_size} is not a number of elements; use 1 or more")
    if stage not in (0, 1, 2):
        raise ValueError(f"stage = {stage!r} is not what ranks share; use 0, 1 (state) or 2 (gradients, too)")
    if stage and not grouped:
        raise ValueError(
            f"stage = {stage} needs the ranks to share among: pass group, such as torch.distributed.group.WORLD"
        )
    if gather_ahead and stage != 1:
        raise ValueError(
            f"gather_ahead is about the weights that stage 1 gathers behind a step, and stage = {stage}; leave it out"
        )
