"""Which optimizers compute the same on parts of parameters, and which a step can give whole ones."""

from __future__ import annotations

from typing import Any

from axonn_plugins.config import ConfigError
from axonn_plugins.optim.by_parameter import reason_against

OF_PRUNED = (
    "moves a kept weight by what pruned ones' gradients are, and samo has gradients and states of kept weights only"
)
"""Why optimizers of whole matrices do not go with pruning."""


def needs_whole_matrices(name: str) -> bool:
    """True if an optimizer of this name would compute another step on shards."""
    from axonn_tp.comm import optimizer_kinds

    return optimizer_kinds.needs_whole_matrices(name)


def looks_at_whole_matrices(optimizer: Any) -> bool:
    """The same of an optimizer, which is tried where its name says nothing."""
    from axonn_tp.comm import optimizer_kinds

    return optimizer_kinds.looks_at_whole_matrices(optimizer)


def check_optimizer(optimizer: Any) -> None:
    """Refuse optimizers that are not element-wise, where a host's own optimizer steps shards.

    Raises:
        ConfigError: names it.
    """
    if optimizer is not None and looks_at_whole_matrices(optimizer):
        raise ConfigError(
            f"the optimizer {type(optimizer).__name__} needs whole weight matrices, which are split; use an element-wise one such as AdamW"
        )


def check_by_parameter(optimizer: Any, pruned: bool) -> None:
    """Refuse optimizers that cannot step parameters one by one, where the suite's optimizer steps.

    Args:
        optimizer: the script's; None: there is none.
        pruned: whether ``samo`` keeps states of kept weights only.

    Raises:
        ConfigError: names it.
    """
    name = type(optimizer).__name__
    against = None if optimizer is None else reason_against(name)
    if against is not None:
        raise ConfigError(
            f"the optimizer {name} {against}, and no rank has all of them; use an element-wise one such as AdamW"
        )
    if optimizer is not None and pruned and needs_whole_matrices(name):
        raise ConfigError(f"the optimizer {name} {OF_PRUNED}; use an element-wise one such as AdamW")
