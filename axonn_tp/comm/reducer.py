"""Gradient sums that are under way while backward still runs, in buckets (what DistributedDataParallel does, by layout).

`sync_gradients` computes the same after backward, and is the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from axonn_tp.comm.at_times import are_marked
from axonn_tp.comm.collectives import Pending, start_all_reduce_
from axonn_tp.comm.gradients import Over, buckets, drop_absent, gradient_dtype, mark_absent, sum_gradients, summed_over
from axonn_tp.comm.replicated import send_first
from axonn_tp.comm.stalls import step_ends
from axonn_tp.grid.mesh import Mesh

# Fewer bytes a call waste time on latency; more delay the first call.
_LEAST_BYTES, _MOST_BYTES, _CALLS = 2**20, 25 * 2**20, 8


@dataclass
class _Bucket:
    """Gradients summed in one call.

    Attributes:
        over: what they are summed over.
        parameters: whose they are.
        offsets: where each gradient begins.
        flat: where the gradients live, from the first that comes until they are summed.
        home: the memory that they had last; nothing else has its address while it is known here.
        arrived: parameters whose gradient this backward pass has brought.
        started: whether the sum has begun.
        pending: the call, where more than one rank takes part.
        present: whether this rank has a gradient of each.
    """

    over: Over
    parameters: list[nn.Parameter]
    offsets: list[int]
    flat: Tensor | None = None
    home: StorageWeakRef | None = None
    arrived: set[nn.Parameter] = field(default_factory=set)
    started: bool = False
    pending: Pending | None = None
    present: list[bool] = field(default_factory=list)


def check_bytes(bucket_bytes: int | None) -> None:
    """Refuse buckets of nothing.

    Raises:
        ValueError: `bucket_bytes` is less than 1.
    """
    if bucket_bytes is not None and bucket_bytes < 1:
        raise ValueError(f"bucket_bytes = {bucket_bytes} is less than 1; give bytes, or None to have them chosen")


class BucketReducer:
    """Sums gradients while backward runs, each over ranks of its own; `GradientReducer` says how it is used.

    Args:
        parameters: trained parameters, the same in the same order on every rank.
        over: which axis a parameter's gradient is summed over.
        divisor: what sums are divided by.
        device: from which the ranks can send.
        bucket_bytes: bytes of gradients a call (`check_bytes`); an eighth of all, at least 1 MiB and at most 25, when None.
        early: sums begin in backward; else in `finish`.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        over: Callable[[nn.Parameter], Over],
        divisor: int,
        device: torch.device,
        bucket_bytes: int | None = None,
        early: bool = True,
    ) -> None:
        self._over, self._divisor, self._device, self._early = over, divisor, device, early
        given = list(parameters)[::-1]
        self._parameters = [parameter for parameter in given if parameter.requires_grad]
        self._frozen = [parameter for parameter in given if not parameter.requires_grad]
        total = sum(p.numel() * gradient_dtype(p).itemsize for p in self._parameters)
        self._size = bucket_bytes or min(_MOST_BYTES, max(_LEAST_BYTES, math.ceil(total / _CALLS)))
        self._syncing = True
        self._summed: set[nn.Parameter] = set()
        self._order: list[nn.Parameter] | None = []
        self._nodes: list[Any] = []
        self._fill(self._parameters)
        self._look_at(self._parameters)

    def _look_at(self, parameters: Iterable[nn.Parameter]) -> None:
        mine = ref(self)  # a node keeps its parameter, and nobody would see that circle
        for parameter in parameters:
            # What adds to .grad, which `torch.autograd.grad` passes by; torch keeps it no longer than somebody else does.
            node = get_gradient_edge(parameter).node
            node.register_prehook(partial(_before, mine, ref(parameter)))
            self._nodes.append(node)
            parameter.register_post_accumulate_grad_hook(partial(_after, mine))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate."""
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    @property
    def unsummed(self) -> bool:
        """True if this rank has a gradient that came, or was added to, after the last sum."""
        return any(p.grad is not None and p not in self._summed for p in self._parameters)

    @property
    def under_way(self) -> bool:
        """True if a pass outside of `no_sync` has brought gradients, of which `finish` has not made sums."""
        return any(bucket.arrived for bucket in self._buckets)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until all sums are there; every rank calls it after the last backward pass of a step."""
        step_ends()
        for bucket in self._buckets:
            if not bucket.started:
                self._start(bucket)
        for bucket in self._buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
            drop_absent(bucket.parameters, bucket.present)
            if self._divisor > 1:
                bucket.flat.div_(self._divisor)  # type: ignore[union-attr]
            self._summed.update(bucket.parameters)
            bucket.started, bucket.pending, bucket.flat = False, None, None
            bucket.arrived.clear()
        self._complete(self._parameters)
        if self._order is not None:
            self._refill()
        self._take_up_late()

    def _complete(self, parameters: Sequence[nn.Parameter]) -> None:
        """End a step of these parameters, whose sums are there."""

    def _fill(self, order: list[nn.Parameter]) -> None:
        """Make the buckets."""
        self._buckets: list[_Bucket] = []
        self._place: dict[nn.Parameter, tuple[_Bucket, int]] = {}
        for over, members in buckets(order, self._size, self._over):
            offsets = list(accumulate((parameter.numel() for parameter in members), initial=0))
            self._buckets.append(bucket := _Bucket(over, members, offsets))
            self._place.update(
                {parameter: (bucket, offset) for parameter, offset in zip(members, offsets, strict=False)}
            )

    def _refill(self) -> None:
        """Make the buckets anew in the order in which rank 0's gradients came; those that did not come are last."""
        assert self._order is not None
        numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        came = dict.fromkeys(numbers[parameter] for parameter in self._order)
        order = torch.tensor([*came, *(set(numbers.values()) - came.keys())], device=self._device)
        if dist.get_world_size() > 1:
            dist.broadcast(order, src=0)
        self._order = None
        self._fill([self._parameters[number] for number in order.tolist()])

    def _take_up_late(self) -> None:
        """Sum what was frozen when this was made, and is trained now; from now on with all others."""
        late = [parameter for parameter in self._frozen if parameter.requires_grad]
        if not late:
            return
        sum_gradients(late, self._over, self._divisor)
        self._complete(late)
        self._frozen = [parameter for parameter in self._frozen if not parameter.requires_grad]
        self._summed.update(late)
        self._look_at(late)
        known = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        self._parameters += late
        self._fill([*known, *late])

    def _before(self, parameter: nn.Parameter) -> None:
        """A gradient comes.

        Raises:
            RuntimeError: the sum that it belongs to is under way.
        """
        if self._place[parameter][0].started:
            raise RuntimeError(
                "a second backward pass came before GradientReducer.finish(); call finish() after the last pass of a step, "
                "and run those before it in no_sync()"
            )
        self._unsum(parameter)

    def _unsum(self, parameter: nn.Parameter) -> None:
        """Scale a sum that the next one is added to, so that summing it over the group again changes nothing."""
        axes, axis = self._place[parameter][0].over
        factor = self._divisor / axes.size(axis)
        if parameter in self._summed and parameter.grad is not None and factor != 1:
            parameter.grad.mul_(factor)
        self._summed.discard(parameter)

    @torch.no_grad()
    def _after(self, parameter: nn.Parameter) -> None:
        """A gradient has come: into the bucket with it, and the sums begin that can."""
        self._adopt(parameter)
        if not self._syncing:
            return
        self._place[parameter][0].arrived.add(parameter)
        if self._order is not None:
            self._order.append(parameter)
        if not self._early:
            return
        for first in self._buckets:
            # All ranks start in one order, whatever the order in which gradients come.
            if len(first.arrived) < len(first.parameters):
                break
            if not first.started:
                self._start(first)

    def _start(self, bucket: _Bucket) -> None:
        bucket.started = True
        bucket.present = [parameter.grad is not None for parameter in bucket.parameters]
        for parameter in bucket.parameters:
            if parameter not in bucket.arrived:
                self._unsum(parameter)
                self._adopt(parameter)
        assert bucket.flat is not None
        mark_absent(bucket.flat.split([parameter.numel() for parameter in bucket.parameters]), bucket.present)
        axes, axis = bucket.over
        if axes.size(axis) > 1:
            bucket.pending = start_all_reduce_(bucket.flat, axes, axis)

    def _adopt(self, parameter: nn.Parameter) -> None:
        """Have a parameter's gradient live in its bucket; a missing one is zero."""
        bucket, offset = self._place[parameter]
        if bucket.flat is None:
            bucket.flat = _present(bucket)
        view = bucket.flat[offset : offset + parameter.numel()].view_as(parameter)
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad.layout is not torch.strided:
            view.copy_(parameter.grad.to_dense())
        elif parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
        parameter.grad = view


class GradientReducer(BucketReducer):
    """Sums gradients over the ranks that read other tokens while backward runs; the gradients of `sync_gradients`.

    ``loss.backward(); reducer.finish()`` takes the place of ``loss.backward(); sync_gradients(...)``. Of several backward
    passes that make one step, all but the last run in `no_sync`. Where the plan keeps layers whole that some ranks may not call (``"replicated"``), and z
    splits others, sums begin in `finish`. A gradient that is there already, as where
    ``zero_grad`` was not called, is added to. Parameters without a gradient are treated as there.

    Args:
        parameters: trained parameters, the same in the same order on every rank. The first pass sums from the last to the
            first of them; later ones in the order in which the first brought rank 0's gradients.
        mesh: the mesh.
        average: see `sync_gradients`.
        bucket_bytes: bytes of gradients a call; an eighth of all, at least 1 MiB and at most 25, when None.

    Raises:
        ValueError: `bucket_bytes` is less than 1.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], mesh: Mesh, average: bool = True, bucket_bytes: int | None = None
    ) -> None:
        check_bytes(bucket_bytes)
        parameters, self.mesh = list(parameters), mesh
        early = mesh.size("z") == 1 or not are_marked(parameters)
        over, divisor = partial(summed_over, mesh=mesh), mesh.grid.batch if average else 1
        super().__init__(parameters, over, divisor, mesh.device, bucket_bytes, early)

    def _complete(self, parameters: Sequence[nn.Parameter]) -> None:
        send_first(((p, p.grad) for p in parameters if p.grad is not None), self.mesh)


def _before(reducer: Any, parameter: Any, gradients: Any) -> None:
    if (held := reducer()) is not None:
        held._before(parameter())


def _after(reducer: Any, parameter: nn.Parameter) -> None:
    if (held := reducer()) is not None:
        held._after(parameter)


def _present(bucket: _Bucket) -> Tensor:
    """Where the gradients live: there still from the last step, or new where ``zero_grad`` let them go.

    Autograd's gradients may be parts of other memory of the same size, such as that of a reduce-scatter that they shared.
    """
    for parameter in bucket.parameters if bucket.home is not None else ():
        if parameter.grad is None or parameter.grad.layout is not torch.strided:
            continue
        if StorageWeakRef(whole := parameter.grad.untyped_storage()) == bucket.home:
            return parameter.grad.new_empty(0).set_(whole)  # type: ignore[call-overload]
    flat = torch.empty(
        bucket.offsets[-1], dtype=gradient_dtype(bucket.parameters[0]), device=bucket.parameters[0].device
    )
    bucket.home = StorageWeakRef(flat.untyped_storage())
    return flat
