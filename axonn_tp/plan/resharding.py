"""The layers that let their gathered weight go after the forward pass, where `Options.reshard_after_forward` is a share of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from axonn_tp.grid.mesh import Grid

if TYPE_CHECKING:
    from axonn_tp.plan.rules import Placement


def decide(placements: Sequence[Placement], grid: Grid) -> None:
    """Give each layer's options what `reshard_after_forward` means for it: true or false.

    The last layers keep their weights: backward needs these first, and would gather them again at once.

    Args:
        placements: of one model, in its order, with the same options; theirs are replaced.
        grid: the grid.
    """
    gathered = {id(one): one.layouts()["weight"].local_numel(grid) for one in placements if one.split is not None}
    share = placements[0].options.reshard_after_forward if placements else False
    room = round((1 - share) * sum(gathered.values()))
    for placement in reversed(placements):
        keeps = share == 0 or (id(placement) in gathered and gathered[id(placement)] <= room)
        room -= gathered.get(id(placement), 0) if keeps else 0
        placement.options = replace(placement.options, reshard_after_forward=not keeps)
