"""Weights that are one in the model are one in what Accelerate gives to be saved; without the block nothing is different."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor, nn

from axonn_plugins.hosts.transformers.readers import has_block


def keeping_ties(original: Callable[..., Any]) -> Callable[..., Any]:
    """An Accelerator's ``get_state_dict``, which under DeepSpeed copies each name's tensor by itself."""

    @wraps(original)
    def get_state_dict(self: Any, model: nn.Module, *rest: Any, **named: Any) -> Any:
        """Accelerate's own, of which `save_pretrained` leaves out the names of tied weights, as in one process."""
        found = original(self, model, *rest, **named)
        of_transformers = hasattr(self.unwrap_model(model), "save_pretrained")  # else files may hold no weight twice
        return _tied(found, self.unwrap_model(model)) if of_transformers and has_block(self) else found

    return get_state_dict


def _tied(found: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    first: dict[nn.Parameter, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in found:
            found[name] = first.setdefault(parameter, found[name])
    return found
