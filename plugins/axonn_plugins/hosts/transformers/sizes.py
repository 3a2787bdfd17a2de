"""Sizes that the block leaves to the planner, ``"gx": "auto"``, under the Trainer and Accelerate.

They deal out samples before there is an engine, so the sizes are chosen as soon as they know the model, and written into their DeepSpeed
configuration. A step has the samples that it would have on as many data-parallel ranks, or ``train_batch_size`` where that is a
number, whatever is chosen; a reader reads as many more at a time as there are fewer readers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from axonn_plugins import config
from axonn_plugins.config import ConfigError

_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)
_TOTAL, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def open_sizes(raw: Any) -> bool:
    """True if a DeepSpeed configuration leaves sizes of its block to the planner."""
    if not isinstance(raw, Mapping) or "axonn" not in raw:
        return False
    block = config.parse(raw["axonn"]).tensor_parallel
    return block is not None and len(block.given) < 3


def settle(raw: dict[str, Any], model: nn.Module, micro: int, steps: int, counted: int) -> int:
    """Choose the sizes that are open and write them into the configuration, with what follows for its batch sizes; every rank calls it.

    Args:
        raw: the configuration.
        model: the serial model.
        micro: samples that the script reads at a time, as one of `counted` processes.
        steps: micro-batches of a step.
        counted: processes that would read different data without the block; 1 where `micro` is that of all.

    Returns:
        Samples that a reader reads at a time.

    Raises:
        ConfigError: no grid divides the model and the batch; the same on every rank.
    """
    known = _numbers(raw)
    known = {_TOTAL: micro * steps * counted} | known | {_STEPS: steps}
    from axonn_plugins.hosts.deepspeed.config_hook import one_sentence_for_mistakes
    from axonn_plugins.hosts.deepspeed.tensor.config import grid_for

    one_sentence_for_mistakes()
    said: list[Any] = [_chosen(known, model) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(said, src=0)
    if isinstance(said[0], str):
        raise ConfigError(said[0])
    sizes, why = said[0]
    raw["axonn"]["tensor_parallel"].update(sizes)
    settings = config.parse(raw["axonn"]).tensor_parallel
    assert settings is not None
    of_reader: int = known[_TOTAL] // (steps * grid_for(settings, dist.get_world_size()).batch)
    raw.update({_TOTAL: known[_TOTAL], _MICRO: of_reader, _STEPS: steps})
    if dist.get_rank() == 0:
        print(f"axonn: {why}; a rank reads {of_reader} samples at a time", file=sys.stderr, flush=True)
    return of_reader


def _chosen(raw: dict[str, Any], model: nn.Module) -> Any:
    """The sizes and why, or what is wrong."""
    from axonn_plugins.hosts.common.tensor_parallel import layer_plans, options
    from axonn_plugins.hosts.deepspeed.tensor import auto_sizes

    block = config.parse(raw["axonn"])
    settings = block.tensor_parallel
    assert settings is not None
    try:
        chosen = auto_sizes.choose_sizes(
            model, settings, raw, dist.get_world_size(), layer_plans(settings), options(settings), block.ted
        )
    except ValueError as error:
        return str(error)
    return dict(chosen.sizes), chosen.why


def _numbers(raw: Any, block: bool = False) -> Any:
    """A configuration without what its host has yet to fill in."""
    if block or not isinstance(raw, Mapping):
        return raw
    return {key: _numbers(value, key == "axonn") for key, value in raw.items() if key == "axonn" or value != "auto"}


def read_by(loader: DataLoader, micro: int) -> DataLoader:
    """A loader of the same samples in the same order, so many at a time.

    Raises:
        ConfigError: its batches are made by a sampler of the script's own.
    """
    if loader.batch_size == micro:
        return loader
    if loader.batch_size is None or not isinstance(loader.batch_sampler, BatchSampler | None):
        raise ConfigError(
            'axonn.tensor_parallel has sizes that are "auto", and a DataLoader has a batch_sampler of the script\'s own, of whose batches the planner '
            "cannot choose how many ranks read one; write gx, gy and gz as numbers, or give the DataLoader a batch_size"
        )
    streamed = isinstance(loader.dataset, IterableDataset)
    sampler = {} if streamed else {"sampler": loader.sampler}
    kept: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)} | sampler
    return DataLoader(loader.dataset, batch_size=micro, drop_last=loader.drop_last, **kept)
