"""DeepSpeed's Muon with its auxiliary Adam, as the suite steps it: each matrix by DeepSpeed's own function, on one rank that has it whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from axonn_plugins.config import ConfigError
from axonn_plugins.optim.whole.newton_schulz import Iteration
from axonn_plugins.optim.whole.rules import Held, momentum_update

_MUON = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "gram"}
_ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}


class MuonWithAdam(torch.optim.Adam):
    """The parameter groups of DeepSpeed's MuonWithAuxAdam: those without `use_muon` are stepped as Adam's, the others by `rule_of`.

    Args:
        params: groups that each have `use_muon`.
        adam_w_mode: whether Adam's weight decay is decoupled.
    """

    def __init__(self, params: Iterable[dict[str, Any]], adam_w_mode: bool = True) -> None:
        groups = [{**(_MUON if group["use_muon"] else _ADAM), **group} for group in params]
        super().__init__(groups, decoupled_weight_decay=adam_w_mode)

    def rule_of(self, options: Mapping[str, Any]) -> DeepSpeedMuon | None:
        """The rule by which a group is stepped that is not element-wise."""
        return DeepSpeedMuon() if options["use_muon"] else None


def muon(engine: Any, parameters: Iterable[Any], settings: dict[str, Any]) -> MuonWithAdam:
    """Make the optimizer that ``"optimizer": {"type": "Muon"}`` names.

    Args:
        engine: DeepSpeed's, which sorts parameters by their marks `use_muon`.
        parameters: what it trains.
        settings: optimizer.params.

    Raises:
        ConfigError: they are not what DeepSpeed's takes.
    """
    from deepspeed.runtime.zero.muon.original_muon import NS_METHODS

    method = settings.get("ns_method", "gram")
    if method not in NS_METHODS:
        raise ConfigError(f"optimizer.params.ns_method = {method!r} is unknown; use {' or '.join(sorted(NS_METHODS))}")
    try:
        groups = engine._muon_param_groups(parameters, settings)
    except ValueError as error:
        raise ConfigError(f"optimizer.type = Muon: {error}") from None
    return MuonWithAdam(groups, settings.get("adam_w_mode", True))


class DeepSpeedMuon:
    """`axonn_plugins.optim.whole.rules.Rule` of DeepSpeed's Muon."""

    everywhere = False

    def iteration(self, options: Mapping[str, Any], parameter: nn.Parameter, shape: tuple[int, ...]) -> Iteration:
        """See `Rule`."""
        from deepspeed.runtime.zero.muon.original_muon import ns_compute_dtype

        heads = getattr(parameter, "muon_num_heads", None) or 1
        scale = math.sqrt(max(1.0, shape[-2] / shape[-1]))
        dtype = ns_compute_dtype(options["ns_method"])
        return Iteration((3.4445, -4.7750, 2.0315), 5, 1e-7, dtype, added=True, scale=scale, heads=heads)

    def send(self, options: Mapping[str, Any], held: Held) -> list[Tensor]:
        """See `Rule`."""
        return [momentum_update(held, options["momentum"], nesterov=True)]

    def whole(self, options: Mapping[str, Any], held: Held, sent: list[Tensor]) -> list[Tensor]:
        """The update of a whole matrix by DeepSpeed's own function, which is given no momentum."""
        from deepspeed.runtime.zero.muon.original_muon import muon_update

        (update,) = sent
        return [
            muon_update(
                update,
                torch.zeros_like(update),
                beta=0.0,
                nesterov=False,
                ns_method=options["ns_method"],
                is_expert_group=getattr(held.parameter, "is_expert_group", False),
                num_heads=getattr(held.parameter, "muon_num_heads", None),
            ).reshape(held.shape)
        ]

    def take(self, options: Mapping[str, Any], held: Held, parts: list[Tensor]) -> None:
        """See `Rule`."""
        held.weights.mul_(1 - options["lr"] * options["weight_decay"])
        held.weights.add_(parts[0], alpha=-options["lr"])
