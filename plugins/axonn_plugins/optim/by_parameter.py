"""Which optimizers cannot step parameters one by one; names alone, so that a configuration can be checked without ours or torch."""

from __future__ import annotations

NOT_BY_PARAMETER = {
    "lbfgs": "computes the loss several times a step",
    "prodigy": "takes the step's length from all weights together",
    "dadapt": "takes the step's length from all weights together",
    "lorafa": "steps one matrix of a pair by the other, which it finds by their places and names",
    "onebit": "communicates by itself",
    "zerooneadam": "communicates by itself",
    "muadam": "has its learning rates by shapes that it reads of whole weights when it is made",
    "musgd": "has its learning rates by shapes that it reads of whole weights when it is made",
}
"""Words in the names of optimizers that do not treat each parameter by itself, and why."""


def reason_against(name: str) -> str | None:
    """Why an optimizer of this name cannot step parameters one by one; None: nothing is known against it."""
    plain = name.lower().replace("_", "")
    return next((reason for word, reason in NOT_BY_PARAMETER.items() if word in plain), None)
