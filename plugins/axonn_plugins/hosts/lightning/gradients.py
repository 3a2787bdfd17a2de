"""Gradients of one model are summed over the ranks that read other data, once backward has made them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from axonn_plugins.config import ConfigError
from axonn_tp import GradientReducer, Mesh
from axonn_tp.comm import clipping
from axonn_tp.layers.loss_watch import LossWatch


class Gradients:
    """The sums of one model's gradients, some of them under way while backward runs.

    What no rank has a gradient of stays without, so that its optimizer leaves it alone, as in one process.

    Args:
        model: split over the mesh.
        mesh: its mesh.

    Attributes:
        optimizers: step by them.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model, self.mesh = ref(model), mesh
        self._reducers: list[GradientReducer] = []
        self._known: set[int] = set()
        self._syncing = True
        self._losses = LossWatch(model)
        self.optimizers: list[Optimizer] = []
        self.prepare()

    def prepare(self, *losses: Tensor) -> None:
        """Before backward of losses: parameters may be trained from now on that were frozen.

        Raises:
            ConfigError: a loss is of shards.
        """
        try:
            self._losses.look(*losses)
        except ValueError as error:
            raise ConfigError(f"AxonnStrategy: {error}") from None
        new = [p for p in self._parameters() if p.requires_grad and id(p) not in self._known]
        if new:
            self._known.update(map(id, new))
            self._reducers.append(GradientReducer(new, self.mesh))

    def _parameters(self) -> Iterator[nn.Parameter]:
        model = self._model()
        assert model is not None
        return model.parameters()

    @property
    def unsummed(self) -> bool:
        """True if this rank has gradients of which no sum over readers has been made."""
        return self._syncing and any(reducer.unsummed for reducer in self._reducers)

    @property
    def left_alone(self) -> bool:
        """True if a pass has brought gradients to be summed, and nobody has called `finish`."""
        return self.mesh.size("grid") > 1 and any(reducer.under_way for reducer in self._reducers)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate."""
        with ExitStack() as stack:
            for reducer in self._reducers:
                stack.enter_context(reducer.no_sync())
            self._syncing = False
            try:
                yield
            finally:
                self._syncing = True

    @torch.no_grad()
    def finish(self) -> None:
        """After backward: the gradients are sums; every rank calls it.

        Raises:
            ConfigError: ranks would step by other learning rates; the same on all of them.
        """
        if not self._syncing or not self._reducers:
            return
        parameters, stated = [p for p in self._parameters() if id(p) in self._known], _stated(self.optimizers)
        own = [*stated, *(255 - byte for byte in stated), *(p.grad is not None for p in parameters)]
        largest = torch.tensor(own, dtype=torch.uint8, device=self.mesh.device)
        if self.mesh.size("grid") > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.mesh.group("grid"))
        for reducer in self._reducers:
            reducer.finish()
        found = largest.tolist()
        if found[: 2 * len(stated)] != own[: 2 * len(stated)]:
            raise ConfigError(
                "AxonnStrategy: options of the optimizers, such as the learning rate, are not the same on all ranks, which would step parts of one weight "
                "differently; where a scheduler goes by what was logged, as ReduceLROnPlateau by its monitor, log that with sync_dist=True, and in "
                "Fabric give it fabric.all_reduce of what it goes by"
            )
        for parameter, present in zip(parameters, found[2 * len(stated) :], strict=True):
            if not present:
                parameter.grad = None


def _stated(optimizers: Iterable[Optimizer]) -> bytes:
    """Tells apart options of optimizers' groups."""
    options = [
        (key, value)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for key, value in sorted(group.items())
        if key != "params" and isinstance(value, bool | int | float | tuple | None)
    ]
    return zlib.crc32(repr(options).encode()).to_bytes(4, "big")


_of: WeakKeyDictionary[nn.Module, Gradients] = WeakKeyDictionary()


def gradients_of(model: nn.Module, mesh: Mesh) -> Gradients:
    """The sums of a model's gradients over a mesh; its parameters are watched once, whoever trains it next."""
    if model not in _of or _of[model].mesh is not mesh:
        _of[model] = Gradients(model, mesh)
    return _of[model]


def finish(every: Iterable[Gradients], mesh: Mesh) -> None:
    """After a backward pass through some of several models: the gradients of these are sums; every rank calls it."""
    every = list(every)
    found = torch.tensor([gradients.unsummed for gradients in every], dtype=torch.uint8, device=mesh.device)
    if mesh.size("grid") > 1 and len(every) > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.group("grid"))
    for gradients, brought in zip(every, found.tolist(), strict=True):
        if brought or len(every) == 1:
            gradients.finish()


def mesh_of(gradients: Iterable[Any]) -> tuple[Mesh | None, list[nn.Parameter]]:
    """The mesh of the split model of which gradients are, with their parameters in the same order; None where some are of none."""
    owners = {
        id(p.grad): (p, sums.mesh) for model, sums in _of.items() for p in model.parameters() if p.grad is not None
    }
    found = [owners.get(id(gradient)) for gradient in gradients]
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return None, []
    return known[0][1], [parameter for parameter, _ in known]


def whole_norm(parameters: Iterable[Any], mesh: Mesh, norm_type: float) -> Tensor:
    """The norm of gradients over the mesh.

    Raises:
        ConfigError: it is of another type than 2 and infinity.
    """
    if norm_type not in (2, float("inf")):
        raise ConfigError(
            f"gradients of a split model are clipped by their norm of type 2 or inf, not {norm_type!r}; use one of these"
        )
    owners = [parameter for parameter in parameters if parameter.grad is not None]
    return clipping.whole_norm([parameter.grad for parameter in owners], owners, mesh, float(norm_type))


def clip(parameters: Iterable[Any], mesh: Mesh, max_norm: float, norm_type: float) -> Tensor:
    """Scale gradients so that their norm over the mesh is at most `max_norm`; returns the norm before (`AxonnStrategy.clip`)."""
    parameters = list(parameters)
    norm = whole_norm(parameters, mesh, norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm
