"""Calls of torch's that a script makes itself on a model with experts of which ranks have different ones.

Wrappers that take all ranks for replicas, and optimizers that look at what this rank has not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from axonn_tp.comm.optimizer_kinds import depends_on_other_parameters, looks_at_whole_matrices

_taken: list[bool] = []
_known: WeakSet[Optimizer] = WeakSet()
_IGNORED = "_ddp_params_and_buffers_to_ignore"
_OURS = ("axonn_plugins.", "samo.", "ted_moe.")
_SUM = "call ted_moe.sync_gradients after backward, or GradientReducer, in its place"


def take_over() -> None:
    """Look at models that are wrapped, and at optimizers that step, from now on; harmless when called again."""
    if _taken:
        return
    _taken.append(True)
    _refuse(
        DistributedDataParallel, "DistributedDataParallel", _of_model, "send one rank's to all and take the mean of"
    )
    # What both kinds of FSDP make of the parameters that they are not told to ignore.
    _refuse(FSDPParam, "fully_shard", _given, "share one rank's out among all and take the mean of")
    _refuse(FlatParamHandle, "FullyShardedDataParallel", _given, "share one rank's out among all and take the mean of")
    register_optimizer_step_pre_hook(_before_step)  # type: ignore[arg-type]


def _of_model(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    ignored = set(getattr(module, _IGNORED, ()))
    return ((f"whose {name!r}", one) for name, one in module.named_parameters() if name not in ignored)


def _given(parameters: Any) -> Iterable[tuple[str, Tensor]]:
    several = [parameters] if isinstance(parameters, Tensor) else parameters
    return ((f"of which a parameter of shape {tuple(one.shape)}", one) for one in several)


def _refuse(kind: type, name: str, taken: Callable[[Any], Iterable[tuple[str, Tensor]]], would: str) -> None:
    """Have a wrapper refuse experts of several ranks.

    Args:
        kind: whose first argument it takes parameters from.
        name: by which scripts know it.
        taken: parameters that it would take for replicas, with what they are called.
        would: what it would do to them.
    """
    original: Callable[..., None] = kind.__init__  # type: ignore[misc]

    @wraps(original)
    def __init__(self: Any, given: Any, *rest: Any, **keywords: Any) -> None:  # noqa: N807
        for called, one in taken(given):
            if getattr(one, "ted_apart", False):
                raise ValueError(
                    f"{name} was given a model {called} is an expert's, of which ranks have different ones, and would {would} their gradients; {_SUM}"
                )
        original(self, given, *rest, **keywords)

    kind.__init__ = __init__  # type: ignore[misc]


def _before_step(
    optimizer: Optimizer, given: tuple[Any, ...] = (), named: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Look at an optimizer that steps experts of several ranks, the first time.

    Raises:
        ValueError: what it does to one weight depends on others that this rank has not.
    """
    ours = hasattr(optimizer, "axonn_in_parts") or any(k.__module__.startswith(_OURS) for k in type(optimizer).__mro__)
    if ours or optimizer in _known:
        return  # ours, and who holds one, look by themselves
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if not any(getattr(one, "ted_apart", False) for one in parameters):
        return
    name = type(optimizer).__name__
    if any(getattr(one, "ted_split", False) for one in parameters) and looks_at_whole_matrices(optimizer):
        raise ValueError(
            f"the optimizer {name} looks at whole weight matrices, of which a rank has shards where tensor ranks split experts, and "
            "would step each rank's in another way; use an element-wise one such as AdamW, or Topology(..., expert_tensor_parallel=False), by which "
            "experts are whole"
        )
    if depends_on_other_parameters(optimizer):
        raise ValueError(
            f"the optimizer {name} takes a norm or a rate of all parameters together, of which a rank has its own experts alone, and would step "
            "replicas of dense layers apart; use one that steps each parameter by itself, such as AdamW"
        )
    _known.add(optimizer)
