"""Which optimizers compute the same on parts of parameters."""

from __future__ import annotations

from typing import Any

from axonn_plugins.config import ConfigError

# Words in the names of optimizers that look at a whole weight matrix, layer or model at once.
NOT_ELEMENTWISE = (
    *("lamb", "lars", "larc", "muon", "muadam", "musgd", "shampoo", "soap", "adafactor", "novograd", "prodigy"),
    *("dadapt", "onebit", "zerooneadam", "lbfgs"),
)


def needs_whole_matrices(name: str) -> bool:
    """Whether an optimizer of this name would compute something else on shards."""
    return any(word in name.lower().replace("_", "") for word in NOT_ELEMENTWISE)


def check_optimizer(optimizer: Any) -> None:
    """Refuse optimizers that are not element-wise.

    Raises:
        ConfigError: names it.
    """
    if optimizer is not None and needs_whole_matrices(type(optimizer).__name__):
        raise ConfigError(
            f"the optimizer {type(optimizer).__name__} needs whole weight matrices, which are split; use an element-wise one such as AdamW"
        )
