"""Which experts a model has that ``axonn.ted`` makes parallel by `ted_moe.adapters`, and over how many ranks; nothing is passed over in silence."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from axonn_plugins.config import Ted
from axonn_tp import Grid
from ted_moe.adapters import Cut, Experts, SpreadExperts, find, splittable, suspect

_COUNTS = re.compile(r"^(num|n|moe_num)_((local|routed)_)?experts$")


def experts_of(model: nn.Module, apart: Collection[str] = ()) -> dict[str, Experts]:
    """A model's experts modules by name.

    Args:
        model: the model.
        apart: names of mixtures that others make parallel.

    Raises:
        ValueError: one is not understood, or was made parallel before, or the configuration speaks of experts that are nowhere.
    """
    for name, module in model.named_modules():
        if isinstance(module, SpreadExperts):
            raise ValueError(f"layer {name} was made parallel before; build the model anew")
    found = find(model, apart)
    for experts in found.values():
        if experts.refusal is not None:
            raise ValueError(f"{experts.refusal}; leave ted out, or give the experts a module that is called so")
    _refuse_adapters(model, found)
    _refuse_shared(model, found)
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    told = {key: value for key, value in getattr(config, "__dict__", {}).items() if _COUNTS.match(key)}
    said = next((key for key, value in told.items() if isinstance(value, int) and value > 1), None)
    if said is not None and not found and not apart and _is_mixture(model):
        raise ValueError(
            f"the model's configuration says {said} = {told[said]}, and no module of {type(model).__name__} was found that holds experts; leave ted "
            "out, or put the experts in a module named experts that is called with hidden states, expert indices and weights"
        )
    looks = suspect(model) if not found and not apart else None
    if looks is not None:
        raise ValueError(
            f"{looks}, and no module that is called with (hidden states, expert indices, weights) and says how many there are (num_experts), so its "
            "experts cannot be dealt out; leave ted out, or put the experts in such a module"
        )
    return found


def _refuse_adapters(model: nn.Module, found: Collection[str]) -> None:
    """Refuse PEFT's wrappers of whole parameters, which add to those of all experts at once, of which a rank has some.

    Raises:
        ValueError: there is one around experts.
    """
    for name in found:
        around, _, own = name.rpartition(".")
        wrapper: Any = model.get_submodule(around) if own == "base_layer" else None
        if wrapper is not None and hasattr(wrapper, "parameter_name"):
            raise ValueError(
                f"layer {around} ({type(wrapper).__name__}) adapts {wrapper.parameter_name} of all experts at once, and a rank has "
                "some of them; leave the experts out of target_parameters, or leave ted out"
            )


def _refuse_shared(model: nn.Module, found: Mapping[str, Experts]) -> None:
    """Refuse experts with a parameter that another layer has, too, which would be cut once for each.

    Raises:
        ValueError: there is one.
    """
    holders = {
        name: module
        for name, module in model.named_modules()
        if any(p is not None for p in module._parameters.values())
    }
    for name, experts in found.items():
        own, inside = {id(p) for p in experts.module.parameters()}, {id(one) for one in experts.module.modules()}
        for other, module in holders.items():
            if id(module) not in inside and any(id(p) in own for p in module._parameters.values()):
                raise ValueError(
                    f"layer {name} has a parameter that {other} has, too, and experts are dealt out layer by layer; give both the same module, or each "
                    "parameters of its own"
                )


def _is_mixture(model: nn.Module) -> bool:
    """True if the class of any module is named after mixtures: a configuration may be that of a model without any."""
    return any(
        re.search(r"(MoE|Moe|MoeBlock|MoELayer|SparseMLP)$", type(module).__name__) for module in model.modules()
    )


def expert_ranks_for(found: Mapping[str, Experts], grid: Grid, block: Ted) -> int:
    """Over how many ranks experts are dealt out.

    Args:
        found: the experts; at least one.
        grid: of the other layers.
        block: the choices.

    Raises:
        ValueError: not over as many as the block says.
    """
    for name, experts in found.items():
        if block.expert != "auto" and experts.count % block.expert:
            raise ValueError(
                f'expert = {block.expert} does not divide the {experts.count} experts of layer {name}; choose a divisor, or "auto"'
            )
    if block.expert != "auto":
        return block.expert
    whole, plane = block.expert_tensor_parallel is False, grid.gx * grid.gy
    most = math.gcd(*(experts.count for experts in found.values()), grid.world if whole else grid.batch)
    fitting = [
        size
        for size in range(1, most + 1)
        if most % size == 0 and (not whole or max(size, plane) % min(size, plane) == 0)
    ]
    return max(fitting)


def cuts_for(found: Mapping[str, Experts], ranks: int) -> dict[str, Mapping[str, Cut]]:
    """Cuts of the parameters of each experts module for so many tensor ranks: those that cannot be split stay whole on each."""
    known: dict[Any, Mapping[str, Cut] | None] = {}
    cuts = {}
    for name, experts in found.items():
        shapes = tuple((each, tuple(p.shape)) for each, p in experts.module.named_parameters())
        like = type(experts.module), experts.count, shapes
        if like not in known:
            known[like] = splittable(experts, ranks) if ranks > 1 else None
        cuts[name] = known[like] or experts.cuts
    return cuts


def described(found: Mapping[str, Experts], cuts: Mapping[str, Mapping[str, Cut]], ranks: int) -> str:
    """Lines for the log on the experts, one for each kind."""
    lines: dict[str, int] = {}
    for name, experts in found.items():
        kept = any(cut.dim is not None for cut in cuts[name].values())
        how = (
            ""
            if ranks == 1
            else f", each split over {ranks} ranks"
            if kept
            else f", each whole on {ranks} ranks, for its shares do not add up"
        )
        line = f"{experts.count} experts of {type(experts.module).__name__}{how}"
        lines[line] = lines.get(line, 0) + 1
    return "\n".join(f"  {number} layers with {line}" for line, number in lines.items())
