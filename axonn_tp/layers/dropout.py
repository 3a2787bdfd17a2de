"""Random numbers in a parallel model: the same on replicas, others on every share, the same again when recomputed.

Ranks of one x-y plane have the same random state. What is drawn for an activation that is split among them (see
`axonn_tp.layers.activation`) comes from a fork of that state, seeded by what the state is and by the rank's place on the axes that
split. If the fork was drawn from, the state itself moves on by one number; otherwise it is left as it was, so that a model
without dropout draws what the serial model draws. Nothing is remembered, so a checkpointed block that is run again with its
random state restored drops the same elements.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def forked(place: tuple[int, ...], device: torch.device) -> Iterator[None]:
    """Draw from a fork inside.

    Args:
        place: other numbers on ranks that are to draw others.
        device: whose random state is forked, besides the CPU's.
    """
    outer = _states(device)
    digest = hashlib.blake2b(repr(place).encode(), digest_size=7)
    for state in outer:
        digest.update(state.numpy().tobytes())
    seed = int.from_bytes(digest.digest(), "little")
    # torch.manual_seed would also queue a seed, with a stack trace, for every kind of device that is not in use.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    fresh = _states(device)
    try:
        yield
    finally:
        drawn = any(not torch.equal(*pair) for pair in zip(_states(device), fresh, strict=True))
        torch.set_rng_state(outer[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(outer[1], device)
        if drawn:
            torch.rand(())


def _states(device: torch.device) -> list[Tensor]:
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *cuda]


def drawing(function: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """True if a function of torch's draws random numbers when it is called so."""
    if function not in DRAWING:
        return False
    if function in ATTENTION:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if function in DROPOUTS:
        share = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        return bool(share and training)
    return True


def _named(*names: str) -> set[Any]:
    return {getattr(home, name) for name in names for home in (torch, Tensor, F) if hasattr(home, name)}


ATTENTION = {F.scaled_dot_product_attention}
DROPOUTS = {
    *_named("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_"),
    *_named("feature_dropout", "feature_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout"),
}
DRAWING = (
    ATTENTION
    | DROPOUTS
    | _named(
        "bernoulli", "bernoulli_", "multinomial", "normal", "normal_", "poisson", "binomial", "uniform_", "random_"
    )
    | _named("exponential_", "geometric_", "cauchy_", "log_normal_", "rand_like", "randn_like", "randint_like")
    | _named(
        "rrelu",
        "rrelu_",
        "gumbel_softmax",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "multi_head_attention_forward",
    )
)
