"""Which optimizers compute the same on parts of parameters."""

from __future__ import annotations

# Words in the names of optimizers that look at a whole weight matrix, layer or model at once.
NOT_ELEMENTWISE = (
    *("lamb", "lars", "larc", "muon", "muadam", "musgd", "shampoo", "soap", "adafactor", "novograd", "prodigy"),
    *("dadapt", "onebit", "zerooneadam", "lbfgs"),
)


def needs_whole_matrices(name: str) -> bool:
    """Whether an optimizer of this name would compute something else on shards."""
    return any(word in name.lower().replace("_", "") for word in NOT_ELEMENTWISE)
