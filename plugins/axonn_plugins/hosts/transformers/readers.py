"""Which ranks read different data, asked before there is an engine.

Accelerate and the Trainer deal out samples, batch sizes and steps over the number of processes. Under the block several
ranks in a row compute on the same samples: gx·gy of them are one reader.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from axonn_plugins import config
from axonn_plugins.config import ConfigError


def replicas(raw: Any, processes: int) -> int:
    """Number of ranks in a row that read the same data under a DeepSpeed configuration; 1 without the block, and until its sizes are chosen.

    Args:
        raw: the configuration.
        processes: how many Accelerate counts.

    Raises:
        ConfigError: the block is wrong, or Accelerate does not see all ranks.
    """
    if not isinstance(raw, Mapping) or "axonn" not in raw:
        return 1
    if _one_reader:
        return processes
    return _replicas(json.dumps(raw["axonn"], sort_keys=True, default=repr), processes)


_one_reader = False


@contextmanager
def as_one_reader(device: torch.device) -> Iterator[None]:
    """Inside, all ranks compute on the same samples and draw the same random numbers, and what is gathered is the first's."""
    global _one_reader
    _one_reader = True
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            seed = torch.randint(2**62, (), device=device)
            dist.broadcast(seed, 0)
            torch.manual_seed(int(seed))
            yield
    finally:
        _one_reader = False


def has_block(accelerator: Any) -> bool:
    """True if an Accelerator's DeepSpeed configuration has the block."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return plugin is not None and isinstance(plugin.deepspeed_config.get("axonn"), Mapping)


@lru_cache(maxsize=8)
def _replicas(block: str, processes: int) -> int:
    from axonn_plugins.hosts.deepspeed.config_hook import one_sentence_for_mistakes
    from axonn_plugins.hosts.deepspeed.tensor.config import grid_for, world_size

    one_sentence_for_mistakes()
    if processes != world_size():
        raise ConfigError(
            f"Accelerate counts {processes} of the {world_size()} ranks of this run, so that each would read all data; make its state after the "
            "DeepSpeed configuration is known, or by accelerate.PartialState(backend=...)"
        )
    parsed = config.parse(json.loads(block))
    settings = parsed.tensor_parallel
    if settings is None:
        return 1 if parsed.ted is None else parsed.ted.tensor
    if len(settings.given) < 3:
        return 1
    grid = grid_for(settings, world_size())
    return grid.world // grid.readers


class Readers:
    """An object of theirs that counts processes, as one that counts readers.

    Args:
        counted: has ``num_processes`` and ``process_index``, or ``world_size``.
        same: ranks in a row that are one reader.
    """

    def __init__(self, counted: Any, same: int) -> None:
        self._counted, self._same = counted, same

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._counted, name)
        return value // self._same if name in ("num_processes", "process_index", "world_size") else value
