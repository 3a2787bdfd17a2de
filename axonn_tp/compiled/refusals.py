"""Models that cannot be compiled, said before they are split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from axonn_tp.grid.mesh import Grid
from axonn_tp.layers.as_share import argument
from axonn_tp.plan.rules import Placement

_LEAVE_OUT = "or leave compile out: torch.compile then leaves split layers as they are"


def check_compiled(model: nn.Module, placements: Iterable[Placement], grid: Grid) -> None:
    """Refuse a model of which `Options(compile=True)` would compile something else, or nothing.

    Raises:
        ValueError: names the layer or the attribute, and the reason.
    """
    if grid.sequence > 1:
        raise ValueError(
            f"sequence = {grid.sequence} does not go with compile = True, as what looks across shared sequences is not traced; "
            f"use sequence = 1, {_LEAVE_OUT}"
        )
    for placement in placements:
        convolution = isinstance(placement.module, _ConvNd) and placement.split is not None
        if convolution or placement.kind == "group_norm":
            raise ValueError(
                f"layer {placement.name}: a {type(placement.module).__name__} that is split is not traced, as compile = True asks; name it replicated "
                f"in the plan, {_LEAVE_OUT}"
            )
        for count in filter(argument, placement.counts):
            raise ValueError(
                f"layer {placement.name}: counts name {count!r}, an argument's width, which is not traced as compile = True asks; have its module read the "
                f"width of what the layer gives, {_LEAVE_OUT}"
            )
    if grid.gx * grid.gy == 1:
        return
    for name, value in dropouts(model):
        raise ValueError(
            f"{name} = {value} does not go with compile = True on gx = {grid.gx}, gy = {grid.gy}, as compiled code would drop the same elements "
            f"of every share; set it to 0, {_LEAVE_OUT}"
        )


def dropouts(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Probabilities of dropout that a model holds: of its dropout modules, and attributes of modules and their configurations."""
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p:
            yield f"{name}.p", module.p
        for prefix, holder in (("", module), ("config.", getattr(module, "config", None))):
            for attribute, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
                if _drops(attribute) and isinstance(value, float) and 0 < value < 1:
                    yield f"{name}.{prefix}{attribute}".lstrip("."), value


def _drops(attribute: str) -> bool:
    # Of whole samples, and of heads that have modules for it.
    return "drop" in attribute and "path" not in attribute and not attribute.startswith(("summary_", "classifier_"))
