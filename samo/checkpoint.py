"""SAMO's compressed state as a dense run's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from axonn_plugins.optim.state import WHOLE
from samo.optimizer import Optimizer


def dense_state_dict(optimizer: Optimizer, device: torch.device | None = None) -> dict[str, Any]:
    """A state_dict that the plain torch optimizer of the dense model takes: zeros where elements are pruned.

    Where ranks share the state every rank calls it. "master", the float32 weights, is there for 16-bit parameters only; torch
    ignores it.

    Args:
        optimizer: SAMO's.
        device: where the state goes, a bucket at a time; None: where it is.
    """
    found = optimizer.state_dict(device)
    by_parameter = {entry.parameter: entry for entry in optimizer.entries}
    numbered = list(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    known = {by_parameter[p].group: found["state"][n] for n, p in numbered if "step" in found["state"].get(n, {})}
    for number, parameter in numbered:
        if number in found["state"]:
            entry = by_parameter[parameter]
            if entry.kept == 0:
                found["state"][number] = _of_nothing(found["state"][number], known.get(entry.group, {}))
            found["state"][number] = {
                key: entry.dense(value) if isinstance(value, Tensor) and value.dim() == 1 else value
                for key, value in found["state"][number].items()
                if key not in ("positions", WHOLE)
            } | found["state"][number].get(WHOLE, {})
    del found["loss_scale"]
    return found


def _of_nothing(state: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """State of a parameter that is pruned whole, which no step has made: as another of its group has it, with no element."""
    empty = {
        key: t.new_empty(0) for key, t in like.items() if isinstance(t, Tensor) and t.dim() == 1 and key != "positions"
    }
    return {key: value for key, value in like.items() if key not in empty} | empty | state
