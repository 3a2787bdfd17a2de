"""DeepSpeed's batch arithmetic over the ranks that read different data, as sentences instead of assertions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axonn_plugins.config.base import ConfigError

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def check(raw: Mapping[str, Any], gz: int, gdata: int, sequence: int = 1) -> None:
    """Refuse batch sizes that do not go together on gz·gdata ranks, of which `sequence` at a time read the same.

    Raises:
        ConfigError: the first mistake.
    """
    total, micro, steps = (raw.get(key) for key in KEYS)
    for key, value in zip(KEYS, (total, micro, steps), strict=True):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{key} = {value!r} is not an integer of at least 1; correct its value")
    if total is None and micro is None:
        raise ConfigError("train_batch_size and train_micro_batch_size_per_gpu are both missing; give one of them")
    if total is None:
        return
    readers = gz // sequence * gdata
    z = "gz" if sequence == 1 else "gz.batch"
    ranks = f"{z}*gdata = {gz // sequence}*{gdata} = {readers} ranks that read different data"
    given = (micro or 1) * (steps or 1)
    if micro and steps and total != given * readers:
        raise ConfigError(
            f"train_batch_size = {total} is not {micro} (train_micro_batch_size_per_gpu) * {steps} (gradient_accumulation_steps) * {ranks}; "
            "leave one of the three out"
        )
    if total % (given * readers):
        wanted = f"{given} * " if given > 1 else ""
        raise ConfigError(
            f"train_batch_size = {total} does not divide by {wanted}{ranks}; use a multiple of {given * readers}"
        )
