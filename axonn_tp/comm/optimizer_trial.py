"""Trial of an optimizer on one small tensor: if it works element by element, and with how many temporary tensors."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ELEMENTS, _STEPS = 4096, 3
_NAMES = "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
BY_ELEMENT = {getattr(torch.optim, name) for name in _NAMES}
_KERNELS = ("deepspeed", "apex", "transformer_engine", "bitsandbytes")
_ALIGNED = 64  # so that vector instructions take the same elements together as without tiles


def along(value: Any, weights: Tensor) -> bool:
    """True if a value of the state has an entry for each element of the weights."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == weights.numel()


@contextmanager
def other_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Iterator[None]:
    """Give the optimizer other parameter groups for a while."""
    own, optimizer.param_groups, optimizer.axonn_in_parts = optimizer.param_groups, groups, True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        optimizer.param_groups = own


class NotElementwiseError(ValueError):
    """An optimizer does to one weight what depends on others."""


@dataclass(frozen=True)
class StepMemory:
    """Tensors as large as the updated one that a step needs, its gradient among them.

    Attributes:
        first: in the step that makes the state.
        later: in any other.
        keys: names of the state that has a value for each element.
    """

    first: int
    later: int
    keys: frozenset[str] = frozenset()

    def elements(self, tile_size: int, first: bool) -> int:
        """Elements updated at a time, so that everything temporary is as large as one tile of gradients."""
        count = max(1, tile_size // (self.first if first else self.later))
        return count - count % _ALIGNED if count > _ALIGNED else count

    def __or__(self, other: StepMemory) -> StepMemory:
        """The memory that is enough for both."""
        return StepMemory(max(self.first, other.first), max(self.later, other.later), self.keys | other.keys)


def make_optimizer(
    factory: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Make an optimizer from parameter groups, and check that it is one.

    Raises:
        ValueError: it is no optimizer, or one whose step needs a closure or another optimizer.
    """
    optimizer = factory(groups)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"the factory returned {type(optimizer).__name__}, not a torch optimizer; pass a function such as "
            "lambda groups: torch.optim.AdamW(groups, lr=1e-3)"
        )
    _refuse_inner(optimizer)
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):  # schedule-free ones
        said = f"{type(optimizer).__name__} puts other weights into parameters to evaluate, by its train() and eval(), and has parts of them here"
        raise ValueError(f"{said}; use it at ZeRO-0 in float32, without what cuts its step, or another such as AdamW")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{type(optimizer).__name__} computes the loss several times a step and looks at all weights together, so it cannot "
            "work in tiles; use an optimizer such as Adam, AdamW or SGD"
        )
    return optimizer


class _Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that operators made and that are alive."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = function(*args, **(kwargs or {}))
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        for tensor in tree_leaves(returned):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._known:
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return returned


def examine(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], weights: Tensor, state: Mapping[str, Any]
) -> StepMemory:
    """Try the optimizer on a stand-in, on a part of it, and on one of as many dims as the weights.

    Args:
        optimizer: left as it was.
        options: of a parameter group.
        weights: of that group; the stand-in has its type, device and dims.
        state: the optimizer's state of `weights`, empty before the first step.

    Returns:
        What a step needs.

    Raises:
        NotElementwiseError: what the optimizer does to an element depends on others.
    """
    _refuse_inner(optimizer)
    options = stirred(options)
    numbers = torch.arange(_ELEMENTS, device=weights.device)
    start, gradient = ((numbers * factor).cos().to(weights.dtype) for factor in (0.1, 0.7))
    gradient *= 0.25 + 4 * numbers / _ELEMENTS  # so that a part's mean square is another than that of all
    kept = {key: value for key, value in state.items() if not along(value, weights)}
    moments = {key: value.new_zeros(()) for key, value in state.items() if along(value, weights)}
    results, part = list[Tensor](), slice(_ELEMENTS // 8, _ELEMENTS // 2)

    def tried(stand_in: Tensor, gradient: Tensor) -> tuple[list[int], frozenset[str]]:
        mine = {key: value.clone() if isinstance(value, Tensor) else value for key, value in kept.items()}
        mine |= {key: value.expand(stand_in.shape).clone() for key, value in moments.items()}
        results.append(stand_in.view(-1))
        # What it counts or keeps beside its state is of one trial.
        trial = copy_without_state(optimizer) if of_python(optimizer) else optimizer
        return _two_steps(trial, options, stand_in, gradient, mine)

    shapes = _full(weights.dim()) if weights.dim() > 1 else []
    for shape in shapes:
        tried(start.clone().view(shape), gradient.view(shape))  # some treat vectors otherwise than matrices
    try:
        tried(start[part].clone(), gradient[part])
        peaks, keys = tried(start.clone(), gradient)
    except Exception as error:
        if shapes:
            raise NotElementwiseError(f"{type(optimizer).__name__} steps whole matrices ({error})") from error
        raise
    *wholes, cut, whole = results
    alike = torch.allclose(whole[part], cut, rtol=1e-5, atol=1e-7)
    if not (alike and all(torch.allclose(whole, other, rtol=1e-5, atol=1e-7) for other in wholes)):
        raise NotElementwiseError(
            f"{type(optimizer).__name__} is not element-wise: what it does to one weight depends on others, so it cannot work "
            'in tiles; use an optimizer such as Adam, AdamW or SGD, or, where ted alone cuts its step, "tile_size": null there'
        )
    first, later = (1 + math.ceil(peak / whole.nbytes - 0.1) for peak in peaks)
    return StepMemory(first, later, keys)


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """One by which an optimizer steps, as Lookahead and its like do."""
    found = (value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer))
    return next((value for value in found if value is not optimizer), None)


def _refuse_inner(optimizer: torch.optim.Optimizer) -> None:
    holds = inner_optimizer(optimizer)
    if holds is not None:
        raise NotElementwiseError(
            f"{type(optimizer).__name__} steps by an optimizer that it holds ({type(holds).__name__}), which would step the parameters that this was made of "
            f"and no parts of them; give {type(holds).__name__} itself"
        )


def say_untried(optimizer: torch.optim.Optimizer, error: Exception) -> None:
    """An optimizer may need what a stand-in has not, such as a sparse gradient."""
    said = f"{type(optimizer).__name__} cannot be tried on small tensors ({type(error).__name__}: {error}), so that nothing is known of its step; "
    warnings.warn(f"{said}one that takes norms or counts calls does something else on shards and parts", stacklevel=2)


def _full(dims: int) -> list[list[int]]:
    """Shapes of this many dims for all of the stand-in's elements, a wide one and a tall one: some scale a step by the sides of a matrix."""
    each = 2 ** (int(math.log2(_ELEMENTS)) // dims)
    return [[first] + [each] * (dims - 2) + [-1] for first in (each // 2, 2 * each)]


def stirred(options: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options with a learning rate: a warm-up begins with 0, which hides what the optimizer does."""
    lr = options.get("lr")
    if isinstance(lr, Tensor):
        return {**options, "lr": torch.full_like(lr, 1e-3)}
    return {**options, "lr": 1e-3} if isinstance(lr, int | float) else dict(options)


def of_python(optimizer: torch.optim.Optimizer) -> bool:
    """False if another library's kernel steps, or something ends with the optimizer, which a copy would end too."""
    return type(optimizer).__module__.partition(".")[0] not in _KERNELS and not hasattr(type(optimizer), "__del__")


def copy_without_state(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]] = ()
) -> torch.optim.Optimizer:
    """An optimizer over `groups` of the same kind and settings, also those that are attributes, without states, hooks and schedulers."""
    made = object.__new__(type(optimizer))  # `copy.copy` leaves out what torch does not pickle
    vars(made).update(
        {key: copy.copy(one) if isinstance(one, dict | list) else one for key, one in vars(optimizer).items()}
    )
    vars(made).pop("step", None)  # a scheduler's, which is bound to the optimizer itself
    made.state = defaultdict(dict)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(made, hooks, OrderedDict())
    made.param_groups = []
    for group in groups:
        made.add_param_group(dict(group))
    return made


def require_one_by_one(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], shapes: Sequence[list[int]] = ([24], [40])
) -> None:
    """Refuse an optimizer to which it matters that parameters are stepped by a call each, as other tensors each time.

    Args:
        optimizer: left as it was.
        options: of a parameter group.
        shapes: of parameters to try it on.

    Raises:
        ValueError: it does something else then.
    """
    _refuse_inner(optimizer)
    tried = of_python(optimizer) and type(optimizer) not in BY_ELEMENT
    if tried and not _steps_one_by_one(optimizer, options, shapes):
        raise ValueError(
            f"{type(optimizer).__name__} cannot step parameters one after another, of which ranks or tiles have parts: it takes a norm or a rate of all "
            "together, counts its calls in an attribute, keeps states outside of optimizer.state, or draws random numbers; "
            "keep counts in param_groups and all else in optimizer.state, or use one such as AdamW"
        )


def _steps_one_by_one(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], shapes: Sequence[list[int]]
) -> bool:
    starts = [
        torch.arange(1.0, math.prod(shape) + 1, dtype=torch.float64).mul(0.1).cos().view(shape) for shape in shapes
    ]

    def moved(calls: list[list[int]]) -> list[Tensor]:
        trial, own = copy_without_state(optimizer), stirred(options)
        values: list[Tensor] = [nn.Parameter(start.clone()) for start in starts]
        for number in range(_STEPS):
            after = own
            for call in calls:
                if len(calls) > 1:
                    for place in call:
                        before = values[place]
                        values[place] = nn.Parameter(before.detach().clone())
                        if before in trial.state:
                            trial.state[values[place]] = trial.state.pop(before)
                for place in call:
                    values[place].grad = (starts[place] * (number + 2) * (place + 1)).sin()
                after = {**own, "params": [values[place] for place in call]}
                with other_groups(trial, [after]):
                    trial.step()
            own = after
        return [value.detach() - start for value, start in zip(values, starts, strict=True)]

    places = list(range(len(shapes)))
    try:
        with torch.random.fork_rng([]):
            together, apart = moved([places]), moved([[place] for place in places])
    except Exception as error:
        say_untried(optimizer, error)
        return True
    return all(bool((a - b).norm() <= 1e-6 * a.norm()) and bool(a.any()) for a, b in zip(together, apart, strict=True))


def _two_steps(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], weights: Tensor, gradient: Tensor, state: dict[str, Any]
) -> tuple[list[int], frozenset[str]]:
    """Step twice; the most bytes allocated in each step, and the state's keys."""
    if state:
        optimizer.state[weights] = state
    most = []
    with other_groups(optimizer, [{**options, "params": [weights]}]):
        try:
            # What bounds a step by moments finds nothing to bound where gradients stay what they were.
            for given in (gradient, 5 * gradient * gradient.abs()):
                weights.grad = given.clone()
                states = [value for value in optimizer.state[weights].values() if isinstance(value, Tensor)]
                with _Allocations([weights, weights.grad, *states]) as allocations:
                    optimizer.step()
                most.append(allocations.most)
        finally:
            found = optimizer.state.pop(weights, {})
    return most, frozenset(key for key, value in found.items() if along(value, weights))
