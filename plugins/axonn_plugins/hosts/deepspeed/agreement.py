"""Agreement of all ranks, before any of them splits the model, on whether they can go on, and with the same settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common import fingerprint
from axonn_plugins.hosts.common.agreement import digest, first_difference, gather, on_ranks
from axonn_plugins.hosts.common.fingerprint import MODEL, Facts
from axonn_plugins.hosts.deepspeed.roll import wait_for_all


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
    everyone = gather((problem, offer, stage, digest(common), digest(facts)))
    for rank, (trouble, *_) in enumerate(everyone):
        if trouble is not None:
            alone = not all(other for other, *_ in everyone)
            raise ConfigError(f"rank {rank}: {trouble}" if alone else trouble)
    if len({common for *_, common, _ in everyone}) > 1:
        raise ConfigError(first_difference(dict(enumerate(gather(common)))))
    for one in sorted({at for _, _, at, *_ in everyone}):
        ranks = [rank for rank, (_, _, at, *_) in enumerate(everyone) if at == one]
        if len({everyone[rank][-1] for rank in ranks}) > 1:
            gathered = gather(facts)
            raise ConfigError(first_difference({rank: gathered[rank] for rank in ranks}))
    return everyone[0][1]


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


def check_shapes(model: nn.Module) -> None:
    """Refuse parameters without a shape, or without all of their elements.

    Raises:
        ValueError: names the first.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter {name} has no shape yet; run the model once before deepspeed.initialize")
        if hasattr(parameter, "ds_id"):
            raise ValueError(
                f"parameter {name} is cut up by deepspeed.zero.Init, which is for ZeRO-3; make the model outside of it"
            )


def refuse_quantized(model: nn.Module) -> None:
    """Refuse base layers of QLoRA and the like.

    Raises:
        ValueError: a layer's weight is not of floating-point numbers.
    """
    for name, module in model.named_modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None and not weight.dtype.is_floating_point:
            raise ValueError(
                f"layer {name} keeps its weight quantized, in {weight.dtype}, as QLoRA does, and what is packed in blocks cannot be cut along its "
                "features; load the base model in bfloat16 and train it with LoRA"
            )


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
