"""A script's own means beside an optimizer that takes gradients out of parameters: they would find none without a word."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from axonn_plugins.optim.alike import require_alike
from axonn_plugins.optim.state import load_masters
from axonn_tp.comm.clipping import clip_by
from axonn_tp.comm.same_options import SameOptions

if TYPE_CHECKING:
    from axonn_plugins.optim.flat import FlatOptimizer
    from axonn_plugins.optim.store import Entry

_takers: Any = WeakTensorKeyDictionary()
"""For each parameter the `Taker` of its gradients."""
_options: weakref.WeakKeyDictionary[FlatOptimizer, SameOptions] = weakref.WeakKeyDictionary()


class Taker:
    """The optimizer that one parameter's gradients go to, for as long as that lives, and no other has taken its place.

    It keeps neither alive, as `_takers` has it for as long as the parameter lives.

    Args:
        optimizer: which.
        entry: of the parameter.
    """

    def __init__(self, optimizer: FlatOptimizer, entry: Entry) -> None:
        self.optimizer, self._entry = weakref.ref(optimizer), weakref.ref(entry)
        self._take: Any = weakref.WeakMethod(optimizer._take)
        self._hook = entry.parameter.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, parameter: Tensor) -> None:
        take, entry = self._take(), self._entry()
        if take is not None and entry is not None:
            take(entry)

    def named(self) -> str | None:
        """The name of the parameter, if the optimizer has taken a gradient of it and says so where one finds none."""
        optimizer, entry = self.optimizer(), self._entry()
        heard = optimizer is not None and optimizer.refuses_clipping
        return entry.name if heard and entry is not None and entry.arrived else None

    def remove(self) -> None:
        """Leave gradients where backward puts them."""
        self._hook.remove()
        entry = self._entry()
        if entry is not None and _takers.get(entry.parameter) is self:
            del _takers[entry.parameter]


class States(dict[Any, Any]):
    """The ``optimizer.state`` that a script finds: nothing to read, as parts of parameters have states; what it throws away is forgotten.

    Args:
        optimizer: whose.
    """

    def __init__(self, optimizer: FlatOptimizer) -> None:
        super().__init__()
        self._optimizer = weakref.ref(optimizer)

    def __missing__(self, parameter: Any) -> Any:
        raise RuntimeError(f"optimizer.state was asked for a parameter's states, {_BY_PARTS}")

    def __setitem__(self, parameter: Any, states: Any) -> None:
        if states:
            raise RuntimeError(f"optimizer.state was given a parameter's states, {_BY_PARTS}")
        self._forget([parameter])

    def __delitem__(self, parameter: Any) -> None:
        self._forget([parameter])

    def pop(self, parameter: Any, *default: Any) -> Any:
        """Forget a parameter's states."""
        self._forget([parameter])
        return default[0] if default else {}

    def clear(self) -> None:
        """Begin anew, as a new optimizer would."""
        self._forget(None)

    def update(self, *given: Any, **named: Any) -> None:
        """Each as if it were set by itself."""
        for parameter, states in dict(*given, **named).items():
            self[parameter] = states

    def setdefault(self, parameter: Any, default: Any = None) -> Any:
        """Refused: it reads."""
        return self[parameter]

    def __reduce__(self) -> Any:
        return dict, ()

    def _forget(self, parameters: list[Any] | None) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        wanted = None if parameters is None else {id(parameter) for parameter in parameters}
        entries = {entry for entry in optimizer.entries if wanted is None or id(entry.parameter) in wanted}
        for segment in (segment for store in optimizer.stores for segment in store.segments):
            if segment.entry in entries:
                optimizer.inner.state.pop(segment.weights, None)
        if optimizer._whole is not None:
            optimizer._whole.forget(entries)


_BY_PARTS = (
    "and this optimizer has states of parts of parameters, of which ranks may hold a share each; read them by optimizer.state_dict(), and change them by "
    "optimizer.load_state_dict()"
)


def _obey_new_states(optimizer: FlatOptimizer) -> None:
    """A script may have put a dictionary of its own in the place of the states.

    Raises:
        RuntimeError: there is something in it.
    """
    given = optimizer.state
    if not isinstance(given, States):
        optimizer.state = States(optimizer)  # type: ignore[assignment]
        optimizer.state.clear()
        for parameter, states in given.items():
            optimizer.state[parameter] = states


def take_over(optimizer: FlatOptimizer) -> list[Taker]:
    """Have gradients go to a new optimizer, and to no earlier one over the same parameters, whose steps are errors then.

    Raises:
        ValueError: ranks that sum gradients have other parameters, options or masks.
    """
    require_alike(optimizer.entries, optimizer.param_groups)
    clip_by(_refuse_clipping_of_nothing)
    optimizer.state = States(optimizer)  # type: ignore[assignment]
    takers = []
    for entry in optimizer.entries:
        before = _takers.get(entry.parameter)
        if before is not None:
            before.remove()
            earlier = before.optimizer()
            if earlier is not None:
                earlier.superseded = entry.name
        taker = _takers[entry.parameter] = Taker(optimizer, entry)
        takers.append(taker)
    return takers


def require_plain(params: Any, parameters: Iterable[Tensor], grouped: bool) -> None:
    """Refuse parameters that others shard, or whose gradients DistributedDataParallel is to sum.

    Args:
        params: as they were given.
        parameters: all of them.
        grouped: whether the optimizer knows the ranks that sum gradients.

    Raises:
        ValueError: they are.
    """
    if not grouped and _several() and isinstance(params, nn.Module):
        if any(isinstance(module, DistributedDataParallel) for module in params.modules()):
            raise ValueError(
                f"{_DDP}; give the module itself, and group = torch.distributed.group.WORLD, which sums compressed gradients"
            )
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        raise ValueError(
            "parameters are DTensors, as fully_shard makes them, of which this optimizer cannot take parts; leave fully_shard "
            "out, and share states by group and stage = 1 or 2"
        )


_DDP = (
    "DistributedDataParallel finds no gradients beside this optimizer, which takes them first, so that each rank would step by "
    "its own"
)


def look_around(optimizer: FlatOptimizer) -> None:
    """Before a step: take gradients that a script has set by hand, and weights that it has written.

    Raises:
        RuntimeError: gradients that would be left out, that were never summed, or of which there are two.
        ValueError: learning rates or other options were not the same on all ranks in an earlier step.
    """
    _look_at_options(optimizer)
    _obey_new_states(optimizer)
    _require_members(optimizer)
    if optimizer.superseded is not None:
        raise RuntimeError(
            f"the gradients of {optimizer.superseded!r} go to another optimizer that was made later; make one of all "
            "parameters, and step that"
        )
    for parameter in optimizer._frozen:
        if parameter.grad is not None:
            raise RuntimeError(
                f"{optimizer.names[parameter]!r} has a gradient but was frozen when the optimizer was made; "
                "set requires_grad before, or make the optimizer anew"
            )
    for entry in optimizer.entries:
        if entry.parameter.grad is not None:
            _refuse_left_over(entry)
            if entry.arrived:
                raise RuntimeError(
                    f"{entry.name!r} was given a gradient by hand beside the one that backward brought, which the optimizer has taken already; change "
                    "gradients as they come, in parameter.register_hook, or give the parameter one without a backward pass"
                )
            optimizer._take(entry)
    if written := _written_since(optimizer):
        optimizer._written(written)


def _look_at_options(optimizer: FlatOptimizer) -> None:
    mesh, entries = optimizer.mesh, optimizer.entries

    def groups() -> set[dist.ProcessGroup]:
        summing = {entry.process_group for entry in entries if entry.process_group is not None}
        return summing if mesh is None else {mesh.group("grid")}

    options = {number: optimizer.param_groups[number] for number in {entry.group for entry in entries}}
    name = type(optimizer.inner).__name__
    _options.setdefault(optimizer, SameOptions()).look(name, groups, options)


def _require_members(optimizer: FlatOptimizer) -> None:
    """Refuse groups whose lists of parameters a script has changed: what is trained was laid out when the optimizer was made.

    Raises:
        RuntimeError: they are other ones.
    """
    numbers = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    moved = (entry.name for entry in optimizer.entries if numbers.get(id(entry.parameter)) != entry.group)
    name = next(moved, None)
    if name is not None or len(numbers) != len(optimizer.names):
        what = "one is there that was not" if name is None else f"{name!r} is no longer where it was"
        raise RuntimeError(
            f"param_groups have other parameters than when the optimizer was made ({what}); freeze a parameter by requires_grad_(False), which had a gradient "
            "then, and make the optimizer anew for others"
        )


def take_written(optimizer: FlatOptimizer) -> None:
    """Between steps: have float32 weights be what a script has written since the last; the next step looks at the rest."""
    if _written_since(optimizer):
        load_masters(optimizer.stores, optimizer.tile_size)


def _written_since(optimizer: FlatOptimizer) -> list[Entry]:
    """Parameters that a script has written since the last step, or given other memory (``parameter.data = ...``).

    Raises:
        RuntimeError: of another type, or elsewhere.
    """
    found = [entry for entry in optimizer.entries if optimizer.writes.counted(entry.parameter)]
    kinds = (
        {entry: (store.dtype, store.device) for store in optimizer.stores for entry in store.entries} if found else {}
    )
    for entry in found:
        now, made = (entry.parameter.dtype, entry.parameter.device), kinds[entry]
        if now != made:
            raise RuntimeError(
                f"{entry.name!r} is {now[0]} on {now[1]}, and was {made[0]} on {made[1]} when the optimizer was made; convert and move a model before"
            )
        if not entry.parameter.is_contiguous():
            entry.parameter.data = entry.parameter.data.contiguous()  # as it was made
    return found


def _refuse_left_over(entry: Entry) -> None:
    """Refuse a gradient of zeros beside one that was taken: DistributedDataParallel leaves it where it has found none."""
    alone = entry.process_group is None and entry.filled and _several()
    if alone and entry.parameter.grad is not None and not bool(entry.parameter.grad.any()):
        raise RuntimeError(
            f"{entry.name!r} has a gradient of zeros beside the one that was taken: {_DDP}; leave it out, and give the optimizer "
            "group = torch.distributed.group.WORLD"
        )


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _refuse_clipping_of_nothing(parameters: list[Any], most: float, norm: Tensor | None, kind: float) -> bool:
    """Have torch's functions say that they find no gradients."""
    for parameter in parameters:
        taker = _takers.get(parameter)
        name = None if taker is None else taker.named()
        if name is not None and parameter.grad is None:
            raise RuntimeError(
                f"clip_grad_{'norm' if norm is not None else 'value'}_ finds no gradient in {name!r}, which the optimizer has taken as backward "
                "brought it; give the optimizer max_norm (under DeepSpeed gradient_clipping), and leave it out"
            )
    return False


def no_scaler() -> ValueError:
    """The sentence for torch.amp.GradScaler."""
    return ValueError(
        "torch.amp.GradScaler finds no gradients beside this optimizer, which takes them as backward brings them; leave it out, "
        "give the optimizer loss_scale = 'dynamic', and call backward on optimizer.scale(loss)"
    )
