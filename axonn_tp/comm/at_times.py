"""Parameters of layers that a plan keeps whole because some ranks may not call them: their gradients' sums begin when backward has ended.

Ranks that lack a gradient would begin its sum behind the others', in another place among the sums over z.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


class _Marked:
    """Lies in a module whose own parameters are marked, so that those of its copies are, too."""

    def __init__(self, module: nn.Module) -> None:
        self.mark(module)

    def mark(self, module: nn.Module) -> None:
        """Mark the module's parameters, those that have taken another's place too."""
        self._parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
        for parameter in self._parameters:
            parameter.axonn_at_times = True  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Marked:
        copied = nn.ParameterList(memo[id(parameter)] for parameter in self._parameters if id(parameter) in memo)
        return _Marked(copied)


def _loaded(module: nn.Module, keys: Any) -> None:
    module.axonn_at_times.mark(module)  # type: ignore[union-attr, operator]


def mark(modules: Iterable[nn.Module]) -> None:
    """Mark the own parameters of modules."""
    for module in modules:
        if "axonn_at_times" in module.__dict__:
            _loaded(module, None)
        elif any(parameter is not None for parameter in module._parameters.values()):
            module.axonn_at_times = _Marked(module)  # type: ignore[assignment]
            module.register_load_state_dict_post_hook(_loaded)


def are_marked(parameters: Iterable[Tensor]) -> bool:
    """True if one of these is trained, and of a layer that some ranks may not call."""
    return any(hasattr(parameter, "axonn_at_times") for parameter in parameters if parameter.requires_grad)
