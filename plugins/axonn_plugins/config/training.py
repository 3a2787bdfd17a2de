"""Mistakes in DeepSpeed's sections on the optimizer, its schedule and clipping, whoever reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

_OPTIMIZER = "lr betas eps weight_decay momentum dampening alpha max_grad_norm freeze_step".split()
_SCHEDULER = (
    "warmup_min_lr warmup_max_lr warmup_num_steps total_num_steps last_batch_iteration warmup_min_ratio cos_min_ratio lr_range_test_min_lr "
    "lr_range_test_step_size lr_range_test_step_rate cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
    "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_min_mom cycle_max_mom decay_mom_rate"
).split()
_NUMBERS = {"optimizer": _OPTIMIZER, "scheduler": _SCHEDULER}
"""Parameters that are numbers, or lists of numbers."""
_USUAL = {"optimizer": "AdamW", "scheduler": "WarmupLR"}


def mistakes(raw: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on values that are none; "auto", which hosts fill in, is one."""
    clip = raw.get("gradient_clipping")
    if isinstance(clip, list) or not _is_number(clip):
        yield f"gradient_clipping = {_told(clip)} is not a number; write one without quotes"
    for name, numbers in _NUMBERS.items():
        found = raw.get(name)
        params = found.get("params") if isinstance(found, Mapping) else None
        for key, value in ((name, found), (f"{name}.params", params)):
            if not isinstance(value, Mapping | None):
                yield f"{key} = {_told(value)} is not an object; write it in braces"
        kind = found.get("type") if isinstance(found, Mapping) else None
        if not isinstance(kind, str | None):
            yield f'{name}.type = {_told(kind)} is not a name; write one in quotes, such as "{_USUAL[name]}"'
        for key, value in (params if isinstance(params, Mapping) else {}).items():
            if key in numbers and not _is_number(value):
                yield f"{name}.params.{key} = {_told(value)} is not a number; write one without quotes"


def _is_number(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_number(one) for one in value)
    return value is None or value == "auto" or (isinstance(value, Real) and not isinstance(value, bool))


def _told(value: Any) -> str:
    return json.dumps(value, default=str)
