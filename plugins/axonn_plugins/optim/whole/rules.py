"""Rules of optimizers: the part that works on a matrix element by element, and the part that needs it whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from axonn_plugins.optim.whole.newton_schulz import Iteration
from axonn_tp.comm.optimizer_trial import other_groups

try:
    from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
except ImportError:  # torch before 2.9 has no Muon
    _adjust_lr = _zeropower_via_newtonschulz = None  # type: ignore[assignment]


@dataclass
class Known:
    """The part of a parameter's state that every rank knows.

    Attributes:
        along: names and types of what has an element for each of the parameter's: each rank has its part.
        values: the rest, the same on every rank.
    """

    along: dict[str, torch.dtype] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Held:
    """The part of a parameter that a rank holds in one step, flat and on the parameter's device.

    Attributes:
        parameter: whose; of the local shape.
        shape: of the serial parameter.
        weights: in float32 at least, to be changed in place.
        gradient: in their type, averaged and clipped; may be changed.
        known: of its state.
        state: by key, what has an element for each of the weights'; to be changed in place.
    """

    parameter: nn.Parameter
    shape: tuple[int, ...]
    weights: Tensor
    gradient: Tensor
    known: Known
    state: dict[str, Tensor]

    def state_of(self, key: str, dtype: torch.dtype) -> Tensor:
        """A state, for which zeros are made where there is none."""
        self.known.along.setdefault(key, dtype)
        if key not in self.state:
            self.state[key] = torch.zeros_like(self.weights, dtype=dtype)
        return self.state[key]


class Rule(Protocol):
    """The step of a parameter group's matrices.

    Attributes:
        everywhere: every rank has each matrix whole, and nothing goes back.
    """

    everywhere: bool

    def iteration(
        self, options: Mapping[str, Any], parameter: nn.Parameter, shape: tuple[int, ...]
    ) -> Iteration | None:
        """The Newton–Schulz iteration of what travels; None: what is done whole is another thing."""

    def send(self, options: Mapping[str, Any], held: Held) -> list[Tensor]:
        """The element-wise part before: what is needed whole, as many tensors on every rank."""

    def whole(self, options: Mapping[str, Any], held: Held, sent: list[Tensor]) -> list[Tensor]:
        """From what was sent, in the serial shape, what every rank needs its part of."""

    def take(self, options: Mapping[str, Any], held: Held, parts: list[Tensor]) -> None:
        """The element-wise part after: change weights and state."""


class Muon:
    """Momentum element by element, of which the update is orthogonalised whole (`torch.optim.Muon`)."""

    everywhere = False

    def iteration(self, options: Mapping[str, Any], parameter: nn.Parameter, shape: tuple[int, ...]) -> Iteration:
        """See `Rule`."""
        return Iteration(options["ns_coefficients"], options["ns_steps"], options["eps"], torch.bfloat16)

    def send(self, options: Mapping[str, Any], held: Held) -> list[Tensor]:
        """In bfloat16, to which torch rounds it first."""
        return [momentum_update(held, options["momentum"], options["nesterov"]).bfloat16()]

    def whole(self, options: Mapping[str, Any], held: Held, sent: list[Tensor]) -> list[Tensor]:
        """The update of a whole matrix by torch's own function."""
        found = _zeropower_via_newtonschulz(sent[0], options["ns_coefficients"], options["ns_steps"], options["eps"])
        return [found.contiguous()]

    def take(self, options: Mapping[str, Any], held: Held, parts: list[Tensor]) -> None:
        """See `Rule`; the scale of the learning rate is by the serial shape."""
        lr = float(options["lr"])
        held.weights.mul_(1 - lr * options["weight_decay"])
        held.weights.add_(parts[0], alpha=-_adjust_lr(lr, options["adjust_lr_fn"], torch.Size(held.shape)))


def momentum_update(held: Held, momentum: float, nesterov: bool) -> Tensor:
    """The update that is to be orthogonalised, from the gradient and the momentum, which it moves on."""
    buffer = held.state_of("momentum_buffer", held.gradient.dtype)
    buffer.lerp_(held.gradient, 1 - momentum)
    return held.gradient.lerp(buffer, momentum) if nesterov else buffer


class AsItIs:
    """Any optimizer that treats each parameter by itself: every rank steps it on the whole of all that it looks at.

    Args:
        optimizer: what steps.
    """

    everywhere = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.after: dict[str, Any] = {}

    def iteration(self, options: Mapping[str, Any], parameter: nn.Parameter, shape: tuple[int, ...]) -> None:
        """See `Rule`."""

    def send(self, options: Mapping[str, Any], held: Held) -> list[Tensor]:
        """Weights, gradient and states."""
        return [held.weights, held.gradient, *(held.state[key] for key in held.known.along)]

    def whole(self, options: Mapping[str, Any], held: Held, sent: list[Tensor]) -> list[Tensor]:
        """The optimizer's own step, on a parameter that has the marks of the model's."""
        known, whole = held.known, nn.Parameter(sent[0])
        vars(whole).update(vars(held.parameter))
        whole.grad = sent[1]
        before = dict(zip(known.along, sent[2:], strict=True)) | known.values
        if before:
            self.optimizer.state[whole] = before
        self.after = {**options, "params": [whole]}
        with other_groups(self.optimizer, [self.after]):
            self.optimizer.step()
        found = self.optimizer.state.pop(whole, {})
        known.along = {key: value.dtype for key, value in found.items() if _alike(value, whole)}
        known.values = {key: value for key, value in found.items() if key not in known.along}
        return [whole.detach(), *(found[key] for key in known.along)]

    def take(self, options: Mapping[str, Any], held: Held, parts: list[Tensor]) -> None:
        """Keep this rank's part."""
        held.weights.copy_(parts[0])
        held.state.clear()
        held.state.update(zip(held.known.along, parts[1:], strict=True))


def _alike(value: Any, whole: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == whole.shape
