"""The place of the experts that a script has made on the ranks, before TED makes replicas of any of them equal.

Ranks that share an expert begin with the weights of the first of them, as under stock DeepSpeed. That must not overwrite another
expert, nor another part of one: a script may have loaded its experts for other ranks than TED's, or split them itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE as StockMoE
from torch import nn

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.deepspeed.ted import tables as ted_tables
from ted_moe import Topology


@dataclass(frozen=True)
class Weights:
    """The facts on experts that ranks exchange.

    Attributes:
        digest: of the weights of all of a rank's experts.
        known: the ranks with the same experts by the groups that DeepSpeed, or the script, has made; None: there are none.
        marked: whether a weight says that it is a part of a matrix.
    """

    digest: str
    known: tuple[int, ...] | None
    marked: bool


def exchange_weights(layers: Mapping[str, StockMoE], ep_size: int) -> list[Weights]:
    """Every rank's, by rank; every rank calls it."""
    known = ted_tables.known_ranks(f"ep_size_{ep_size}")
    own = Weights(_digest(_parameters(layers)), None if known is None else tuple(known), marked(layers) is not None)
    everyone: list[Weights] = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def marked(layers: Mapping[str, StockMoE]) -> str | None:
    """The first layer with an expert's weight that Megatron's mark calls a part of a matrix."""
    for name, layer in layers.items():
        if any(getattr(parameter, "tensor_model_parallel", False) for parameter in _experts(layer).parameters()):
            return name
    return None


def refuse_split(layers: Mapping[str, StockMoE], tensor: int) -> None:
    """Refuse parts of experts where TED would split whole ones.

    Raises:
        ValueError: names the layer.
    """
    name = marked(layers)
    if name is not None and tensor > 1:
        raise ValueError(
            f"tensor = {tensor} splits experts, and those of layer {name} are split already (tensor_model_parallel); leave tensor out and "
            "give deepspeed.initialize the mpu that they were split by"
        )


def same_on_tensor_ranks(everyone: Sequence[Weights], topology: Topology) -> bool:
    """True if each tensor group has the same weights on all of its ranks."""
    return _same(everyone, topology.tensor_group)


def kept(everyone: Sequence[Weights], topology: Topology) -> bool:
    """True if nothing is overwritten when the ranks that share an expert become equal: all of them, or those of a part of one."""
    return _same(everyone, topology.expert_data_group)


def refuse_others(everyone: Sequence[Weights], topology: Topology, others: Iterable[Topology], own: bool) -> None:
    """Refuse experts that were made for other ranks than the topology's.

    Ranks that drew at random what they will share have other weights in every layout: these become equal, as under stock DeepSpeed.

    Args:
        everyone: by rank.
        topology: that of this run.
        others: that the script may have had in mind.
        own: experts are split already, so that tensor ranks differ.

    Raises:
        ConfigError: weights would be overwritten, and would not in another layout; on every rank.
    """
    if kept(everyone, topology) and (
        own or not topology.expert_tensor_parallel or same_on_tensor_ranks(everyone, topology)
    ):
        return
    known = [weights.known for weights in everyone]
    layouts: list[Callable[[int], Sequence[int]]] = [other.expert_data_group for other in others]
    if all(ranks is not None for ranks in known):
        layouts.append(lambda rank: known[rank] or ())
    for layout in layouts:
        if len(layout(0)) > 1 and _same(everyone, layout):
            mine, theirs = _partners(topology), list(layout(0))
            raise ConfigError(
                f"axonn.ted: the experts' weights are equal on ranks {theirs}, and TED has the same experts on {mine}, so that experts would be "
                "lost; number a rank's experts by its place in its group of ranks with different experts, of which the first is "
                f"{list(topology.expert_group(0))}, or load a checkpoint after deepspeed.initialize"
            )


def _partners(topology: Topology) -> list[int]:
    ranks = set(topology.expert_data_group(0))
    return sorted(ranks | set(topology.tensor_group(0)) if topology.expert_tensor_parallel else ranks)


def _same(everyone: Sequence[Weights], group: Callable[[int], Sequence[int]]) -> bool:
    return all(everyone[other].digest == mine.digest for rank, mine in enumerate(everyone) for other in group(rank))


def _experts(layer: StockMoE) -> nn.Module:
    return layer.deepspeed_moe.experts


def _parameters(layers: Mapping[str, StockMoE]) -> list[nn.Parameter]:
    return [parameter for layer in layers.values() for parameter in _experts(layer).parameters()]


def _digest(parameters: Iterable[nn.Parameter]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for parameter in parameters:
        found.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
