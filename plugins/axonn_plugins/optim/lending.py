"""A step of any element-wise torch optimizer, a tile at a time, on the state that its whole step would have (000, section 7.2).

The state stays that of whole tensors; a tile is lent parts of it, as views or as copies that visit the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from axonn_tp.comm.optimizer_trial import along, other_groups


@dataclass(eq=False)
class Part:
    """Consecutive elements of a tensor of weights.

    Attributes:
        group: number of its parameter group.
        weights: the whole tensor, on which the optimizer's state is keyed; without holes in memory where `of` is used.
        begin: first element, in the order of memory.
        end: behind the last.
    """

    group: int
    weights: Tensor
    begin: int
    end: int

    @property
    def whole(self) -> bool:
        """True if the part is all of the tensor."""
        return self.end - self.begin == self.weights.numel()

    @property
    def last(self) -> bool:
        """True if the tensor ends with this part."""
        return self.end == self.weights.numel()

    def like(self, value: Tensor) -> Tensor:
        """Memory for a state of the whole tensor, of which `value` is this part's."""
        return torch.empty_like(self.weights, dtype=value.dtype, device=value.device, requires_grad=False)

    def of(self, tensor: Tensor) -> Tensor:
        """The same elements of a tensor with the strides of the weights, flat."""
        return tensor.detach().as_strided((self.end - self.begin,), (1,), tensor.storage_offset() + self.begin)


@dataclass(eq=False)
class Loan:
    """The tensors by which the optimizer updates a part.

    Attributes:
        part: which elements.
        weights: their weights, flat and in the type of the update; `part.weights` itself where nothing has to be lent.
        gradient: theirs, flat, in the same type.
        visitors: the state's values of these elements, by key, where they are copies of what is kept elsewhere; None: they are
            views of it.
        keep: makes memory for a new state of the whole tensor from its key and from its values of this part; None: as
            `Part.like`.
    """

    part: Part
    weights: Tensor
    gradient: Tensor
    visitors: Mapping[str, Tensor] | None = None
    keep: Callable[[str, Tensor], Tensor] | None = None


def flat(tensor: Tensor) -> Tensor:
    """The elements of a tensor without holes, in their order in memory, so that channels-last stays what it is."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def parts_of(group: int, weights: Tensor, size: int) -> Iterator[Part]:
    """Cut a tensor into parts of `size` elements."""
    for begin in range(0, weights.numel(), size):
        yield Part(group, weights, begin, min(begin + size, weights.numel()))


def require_groups(made: Sequence[dict[str, Any]], given: Sequence[dict[str, Any]]) -> None:
    """Refuse a factory that makes parameter groups of its own.

    Args:
        made: of the optimizer that it made.
        given: to it.

    Raises:
        ValueError: there are not as many.
    """
    if len(made) != len(given):
        raise ValueError(
            f"the factory made an optimizer of {len(made)} parameter groups where it was given {len(given)}, and parts of parameters are "
            "stepped in the groups that it was given; have it pass these on as they are, as lambda groups: torch.optim.AdamW(groups, lr=1e-3) does"
        )


def share_options(from_groups: list[dict[str, Any]], to_groups: list[dict[str, Any]]) -> None:
    """Have parameter groups take over the hyperparameters of others."""
    for source, target in zip(from_groups, to_groups, strict=True):
        target.update({key: value for key, value in source.items() if key != "params"})


class TiledStep:
    """One step of an optimizer: `tile` for each tile, then `finish`.

    Parts of one tensor come in their order. What the optimizer counts, in a tensor's state or in a group, it counts once.

    Args:
        optimizer: with its own parameter groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before: dict[Tensor, dict[str, Any]] = {}
        self._options: dict[int, dict[str, Any]] = {}

    def tile(self, loans: Sequence[Loan]) -> None:
        """Update parts by their flat gradients, in the order of memory."""
        held = []
        for loan in loans:
            self._lend(loan)
            held.append(loan.weights.grad)
            loan.weights.grad = loan.gradient.as_strided(
                loan.weights.shape, loan.weights.stride(), loan.gradient.storage_offset()
            )
        options = {
            number: {
                **self._optimizer.param_groups[number],
                "params": [loan.weights for loan in loans if loan.part.group == number],
            }
            for number in dict.fromkeys(loan.part.group for loan in loans)
        }
        with other_groups(self._optimizer, list(options.values())):
            self._optimizer.step()
        for loan, own in zip(loans, held, strict=True):
            loan.weights.grad = own
            self._take_back(loan)
        self._options |= options

    def finish(self) -> None:
        """Take over what the optimizer changed in its groups."""
        for number, options in self._options.items():
            self._optimizer.param_groups[number].update({k: v for k, v in options.items() if k != "params"})

    def _lend(self, loan: Loan) -> None:
        """Have the optimizer find a state at the loan's weights."""
        part, state = loan.part, self._optimizer.state
        if loan.weights is part.weights:
            return
        if part.whole and loan.visitors is None:
            if part.weights in state:
                state[loan.weights] = state.pop(part.weights)
            return
        before = self._before.setdefault(part.weights, dict(state.get(part.weights, {})))
        if before:
            options = self._optimizer.param_groups[part.group]
            beside = loan.weights.device if options.get("fused") or options.get("capturable") else None
            visitors = loan.visitors or {}
            state[loan.weights] = {
                key: visitors[key]
                if key in visitors
                else part.of(value)
                if along(value, part.weights)
                else _copy(value, beside)
                for key, value in before.items()
            }

    def _take_back(self, loan: Loan) -> None:
        part, state = loan.part, self._optimizer.state
        if loan.weights is part.weights:
            return
        found: Mapping[str, Any] = state.pop(loan.weights, {})
        if not found:
            return
        if part.whole and loan.visitors is None:
            state[part.weights] = found
            return
        kept = state[part.weights]
        for key, value in found.items():
            if along(value, loan.weights):
                if key not in kept:
                    kept[key] = part.like(value) if loan.keep is None else loan.keep(key, value)
                place = (loan.visitors or {}).get(key)
                place = part.of(kept[key]) if place is None else place
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value, non_blocking=True)
            elif part.last:
                kept[key] = value


def _copy(value: Any, device: torch.device | None) -> Any:
    return value.to(device, copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
