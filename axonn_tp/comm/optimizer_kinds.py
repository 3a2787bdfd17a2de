"""Optimizers by what their step of one element depends on: by their names, and by trials on small tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from axonn_tp.comm.optimizer_trial import (
    BY_ELEMENT,
    NotElementwiseError,
    copy_without_state,
    examine,
    inner_optimizer,
    of_python,
    other_groups,
    say_untried,
    stirred,
)

NOT_ELEMENTWISE = (
    "lamb lars larc muon muadam musgd shampoo soap adafactor novograd prodigy dadapt onebit zerooneadam lbfgs lorafa"
).split()
"""Words in the names of optimizers that look at a whole weight matrix, layer or model at once."""
_OF_ALL = "prodigy dadapt onebit zerooneadam lbfgs".split()
"""Words in the names of those that look at all parameters at once."""
_STEPS = 3


def depends_on_others(optimizer: torch.optim.Optimizer) -> bool:
    """True if what an optimizer does to an element of a parameter depends on others of it, as far as a trial can tell.

    Args:
        optimizer: left as it was; its parameters are not touched.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer) in BY_ELEMENT or not of_python(optimizer):
        return False
    holds = inner_optimizer(optimizer)
    if holds is not None:  # a trial of one would step the other's parameters
        return looks_at_whole_matrices(holds)
    try:
        for group in optimizer.param_groups:
            kinds = {(p.device, torch.promote_types(p.dtype, torch.float32), p.dim()): p for p in group["params"]}
            for (device, dtype, dims), one in kinds.items():
                known = optimizer.state.get(one, {})  # that it was made with; moments are another's
                known = {} if any(isinstance(value, Tensor) for value in known.values()) else known
                with torch.random.fork_rng([]):
                    examine(optimizer, group, torch.zeros([0] * max(dims, 1), device=device, dtype=dtype), known)
    except NotElementwiseError:
        return True
    except Exception as error:
        say_untried(optimizer, error)
    return False


def depends_on_other_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """True if what an optimizer does to a parameter depends on the gradients of others, as far as its name and a trial can tell.

    Args:
        optimizer: left as it was; its parameters are not touched.
    """
    if _has(type(optimizer).__name__, _OF_ALL):
        return True
    if not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer) in BY_ELEMENT or not of_python(optimizer):
        return False
    holds = inner_optimizer(optimizer)
    if holds is not None:
        return depends_on_other_parameters(holds)
    try:
        return any(_depend_on_each_other(optimizer, group) for group in optimizer.param_groups if group["params"])
    except Exception as error:
        say_untried(optimizer, error)
        return False


def _depend_on_each_other(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """True if the step of a stand-in is another one where the gradient of a second is."""
    like = max(group["params"], key=Tensor.dim)
    shape = (6, 4, *[1] * (like.dim() - 2)) if like.dim() > 1 else (24,)
    start = torch.arange(1, 25, device=like.device).mul(0.1).cos().view(shape)
    start = start.to(torch.promote_types(like.dtype, torch.float32))
    known = optimizer.state.get(like, {})  # that it was made with
    known = {} if any(isinstance(value, Tensor) for value in known.values()) else known

    def moved(factor: float) -> Tensor:
        trial, pair = copy_without_state(optimizer), [nn.Parameter(start.clone()) for _ in range(2)]
        trial.state.update({one: dict(known) for one in pair if known})
        devices = [] if like.device.type == "cpu" else [like.device]
        with torch.random.fork_rng(devices), other_groups(trial, [{**stirred(group), "params": pair}]):
            torch.manual_seed(0)
            for number in range(_STEPS):
                for one, times in zip(pair, (1.0, factor), strict=True):
                    one.grad = (start * (number + 2) * times).sin() * times
                trial.step()
        return pair[0].detach() - start

    alone, beside = moved(1.0), moved(50.0)
    return bool((alone - beside).norm() > 1e-5 * alone.norm())


def needs_whole_matrices(name: str) -> bool:
    """True if an optimizer of this name would compute another step on shards."""
    return _has(name, NOT_ELEMENTWISE)


def _has(name: str, words: list[str]) -> bool:
    return any(word in name.lower().replace("_", "") for word in words)


def looks_at_whole_matrices(optimizer: Any) -> bool:
    """True if an optimizer would compute another step on shards; it is tried where its name says nothing."""
    return (
        needs_whole_matrices(type(optimizer).__name__)
        or depends_on_others(optimizer)
        or depends_on_other_parameters(optimizer)
    )
