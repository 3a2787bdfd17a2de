"""Whether all ranks can go on, and with the same thing, before any of them splits the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common import fingerprint
from axonn_plugins.hosts.common.fingerprint import MODEL, Facts
from axonn_plugins.hosts.deepspeed.roll import wait_for_all
from axonn_plugins.hosts.deepspeed.sections import needs_whole_matrices

_MOST_SHOWN = 100
"""Characters of a value in a message."""


def agree(problem: str | None, facts: Facts, offer: Any = None, stage: int = 0) -> Any:
    """Go on only if all ranks can, and with the same thing.

    Args:
        problem: why this rank cannot.
        facts: what must be the same on all ranks; those whose names begin with `MODEL`, on those of one stage.
        offer: something for all.
        stage: of a pipeline.

    Returns:
        What rank 0 offers.

    Raises:
        ConfigError: the same on every rank.
    """
    absent = wait_for_all()
    if absent:
        raise ConfigError(
            f"the configuration on {on_ranks(absent)} has no axonn block, and that of rank {dist.get_rank()} has one; start all ranks with the "
            "same configuration"
        )
    common = {name: value for name, value in facts.items() if not name.startswith(MODEL)}
    everyone = _gather((problem, offer, stage, _digest(common), _digest(facts)))
    for rank, (trouble, *_) in enumerate(everyone):
        if trouble is not None:
            alone = not all(other for other, *_ in everyone)
            raise ConfigError(f"rank {rank}: {trouble}" if alone else trouble)
    if len({common for *_, common, _ in everyone}) > 1:
        raise ConfigError(first_difference(dict(enumerate(_gather(common)))))
    for one in sorted({at for _, _, at, *_ in everyone}):
        ranks = [rank for rank, (_, _, at, *_) in enumerate(everyone) if at == one]
        if len({everyone[rank][-1] for rank in ranks}) > 1:
            gathered = _gather(facts)
            raise ConfigError(first_difference({rank: gathered[rank] for rank in ranks}))
    return everyone[0][1]


def _digest(facts: Facts) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def compare(
    model: nn.Module, config_class: Any, optimizer: Any, keywords: dict[str, Any], problem: str | None = None
) -> None:
    """Go on only if all ranks start the same engine with the same things; looks once at each configuration.

    Args:
        model: the serial model, the same on every rank, or a pipeline's stage.
        config_class: DeepSpeed's parsed configuration.
        optimizer: the script's.
        keywords: the other arguments of `deepspeed.initialize`.
        problem: why this rank cannot.

    Raises:
        ConfigError: names the first thing that differs, the same on every rank.
    """
    if getattr(config_class, "axonn_compared", False):
        return
    config_class.axonn_compared = True
    facts = {} if problem else facts_of(model, config_class.axonn_raw, optimizer, keywords)
    agree(problem, facts, stage=getattr(model, "stage_id", 0))


def facts_of(model: nn.Module, raw: Mapping[str, Any], optimizer: Any, keywords: dict[str, Any]) -> Facts:
    """All that must be the same on ranks that start an engine.

    A list of the parameters stands in the place of an iterator among `keywords`, which can be read but once.
    """
    given = keywords.get("model_parameters")
    if given is not None and not isinstance(given, (list, tuple)):
        given = keywords["model_parameters"] = list(given)
    return {
        **fingerprint.of_configuration(raw),
        **fingerprint.of_versions(),
        **fingerprint.of_model(model),
        **fingerprint.of_arguments(model, optimizer, given, keywords.get("lr_scheduler")),
    }


def first_difference(everyone: Mapping[int, Facts]) -> str:
    """The first fact that ranks do not share, with each value and its ranks, as a sentence."""
    for name in dict.fromkeys(name for facts in everyone.values() for name in facts):
        ranks_by_value: dict[str | None, list[int]] = {}
        for rank, facts in everyone.items():
            ranks_by_value.setdefault(facts.get(name), []).append(rank)
        if len(ranks_by_value) > 1:
            break
    values = list(ranks_by_value)
    told = [f"{_shown(value, values)} on {on_ranks(ranks)}" for value, ranks in ranks_by_value.items()]
    return f"{name} is {' and '.join(told)}; start all ranks with the same configuration and script"


def _shown(value: str | None, values: list[str | None]) -> str:
    """A long value from where it begins to differ from the others."""
    if value is None:
        return "not there"
    if len(value) <= _MOST_SHOWN:
        return value
    others = [other or "" for other in values if other != value]
    same = min(next((at for at, (a, b) in enumerate(zip(value, other)) if a != b), len(other)) for other in others)  # noqa: B905  of unequal lengths
    start = max(0, same - _MOST_SHOWN // 2)
    return ("..." if start else "") + value[start : start + _MOST_SHOWN] + "..."


def on_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _gather(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(everyone, mine)
    except RuntimeError:
        raise ConfigError("another rank ended before the model was split; its own message says why") from None
    return everyone


def check_shapes(model: nn.Module) -> None:
    """Refuse parameters without a shape.

    Raises:
        ValueError: names the first.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter {name} has no shape yet; run the model once before deepspeed.initialize")


def refuse_experts(model: nn.Module) -> None:
    """Refuse DeepSpeed's mixtures of experts.

    Raises:
        ValueError: names the first.
    """
    from deepspeed.moe.layer import MoE

    for name, module in model.named_modules():
        if isinstance(module, MoE):
            raise ValueError(
                f"layer {name} is a DeepSpeed MoE, whose experts differ between ranks; give axonn the key ted, which knows them"
            )


def check_optimizer(optimizer: Any) -> None:
    """Refuse optimizers that are not element-wise.

    Raises:
        ValueError: names it.
    """
    if optimizer is not None and needs_whole_matrices(type(optimizer).__name__):
        raise ValueError(
            f"the optimizer {type(optimizer).__name__} needs whole weight matrices, which are split; use an element-wise one such as AdamW"
        )
