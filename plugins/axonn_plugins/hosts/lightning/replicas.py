"""Ranks that differ only in x and y compute on the same data: it is compared before they compute, so that no result is a mixture."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common import digests
from axonn_plugins.hosts.common.replicas import align_random_state
from axonn_tp import Mesh

_LOSS = 1e-3
"""Relative distance between losses that are taken for the same."""
_ADVICE = (
    "let the strategy deal out the data (fabric.setup_dataloaders, or the Trainer's use_distributed_sampler), or make a sampler over "
    "strategy.distributed_sampler_kwargs"
)


class Replicas:
    """Compares what the ranks of this rank's x-y plane are given.

    Args:
        mesh: the run's.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    @torch.compiler.disable
    def inputs(self, values: Any, what: str) -> None:
        """Compare tensors and numbers in nested containers; random states that have come apart are made the same again.

        Args:
            values: what the model is called with.
            what: it is, for the message.

        Raises:
            ConfigError: they differ, the same on all ranks that call.
        """
        if self.mesh.size("model") == 1:
            return
        found = list(digests.leaves("", values))
        elements = digests.of_text(repr([(name, digests.kind(value)) for name, value in found]))
        total = torch.tensor(elements, dtype=torch.int64, device=self.mesh.device)
        for _, value in found:
            if isinstance(value, Tensor) and not value.is_meta:
                total = total * 31 + digests.digest(value).to(self.mesh.device)
        state = torch.tensor(digests.random_state(self.mesh.device), device=self.mesh.device)
        plane = self._gather(torch.cat([total[None], state]))
        if (plane[:, 1:] != plane[:1, 1:]).any():
            align_random_state(self.mesh)
        if (plane[:, 0] != plane[0, 0]).any():
            raise ConfigError(
                f"{what} differs between ranks {self._ranks()}, which compute on the same data; {_ADVICE}"
            )

    def loss(self, loss: Tensor) -> None:
        """Compare the loss that is differentiated.

        Raises:
            ConfigError: it differs, the same on all ranks that call.
        """
        if self.mesh.size("model") == 1 or loss.numel() != 1:
            return
        plane = self._gather(loss.detach().double().reshape(1).to(self.mesh.device))
        first = plane[0]
        same = torch.isclose(plane, first, rtol=_LOSS, atol=1e-6, equal_nan=True) | ~(
            plane.isfinite() | first.isfinite()
        )
        if not same.all():
            raise ConfigError(
                f"the loss differs between ranks {self._ranks()}, which compute on the same data ({plane[:, 0].tolist()}), so their labels "
                f"differ or the plan leaves features split; {_ADVICE}"
            )

    def _gather(self, card: Tensor) -> Tensor:
        cards = [torch.empty_like(card) for _ in range(self.mesh.size("model"))]
        dist.all_gather(cards, card, group=self.mesh.group("model"))
        return torch.stack(cards)

    def _ranks(self) -> str:
        return " and ".join(map(str, dist.get_process_group_ranks(self.mesh.group("model"))))


class Readers(int):
    """Number of ranks that read different data, as a sampler's number of replicas."""


_made: list[Mesh] = []


def own_samplers(mesh: Mesh) -> None:
    """Have samplers of a script's own that count ranks, or readers and this rank's number, deal out to readers."""
    from axonn_plugins.hosts.common.replicas import share_samplers

    share_samplers(mesh)
    _made[:] = [mesh]
    if not getattr(DistributedSampler.__init__, "axonn", False):
        DistributedSampler.__init__ = _placed(DistributedSampler.__init__)  # type: ignore[method-assign]


def mean_over_readers(value: Tensor) -> Tensor:
    """A number's mean over readers, where a strategy of ours runs; every rank calls it."""
    if not _made or _made[0].size("batch") == 1:
        return value
    found = value.detach().clone().to(_made[0].device)
    dist.all_reduce(found, group=_made[0].group("batch"))
    return found / _made[0].size("batch")


def _placed(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: Any, dataset: Any, num_replicas: Any = None, rank: Any = None, *rest: Any, **named: Any) -> None:
        # No rank but the first has its own number among the readers, where several ranks are one reader.
        mesh = _made[0] if _made else None
        if mesh is not None and mesh.size("model") > 1 and dist.is_initialized():
            if num_replicas == mesh.size("batch") and rank == dist.get_rank():
                rank = mesh.rank("batch")
        original(self, dataset, num_replicas, rank, *rest, **named)

    __init__.axonn = True  # type: ignore[attr-defined]
    return __init__


def keep_order() -> None:
    """Where one process would go through data in an order that all ranks know, have Fabric's and the Trainer's readers together do the same."""
    from lightning.fabric import Fabric
    from lightning.pytorch.trainer.connectors import data_connector

    if not getattr(data_connector._get_distributed_sampler, "axonn", False):
        data_connector._get_distributed_sampler = _in_order(data_connector._get_distributed_sampler)
        Fabric._get_distributed_sampler = staticmethod(_in_order(Fabric._get_distributed_sampler))  # type: ignore[method-assign]


def _in_order(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _get_distributed_sampler(dataloader: Any, *rest: Any, **named: Any) -> Any:
        if isinstance(named.get("num_replicas"), Readers):
            found = _ordered(dataloader.sampler, drop_last=getattr(dataloader, "drop_last", False), **named)
            if found is not None:
                return found
        return original(dataloader, *rest, **named)

    _get_distributed_sampler.axonn = True  # type: ignore[attr-defined]
    return _get_distributed_sampler


def _ordered(
    sampler: Any, num_replicas: int, rank: int, drop_last: bool, mode: Any = None, **rest: Any
) -> DistributedSampler | None:
    """A sampler by which readers together go through data as one process does; None where their ranks could not know its order.

    Args:
        sampler: one process'.
        num_replicas: how many readers there are.
        rank: this one's number.
        drop_last: whether one process would leave an incomplete batch out.
        mode: the Trainer's, whose predictions have samplers of their own; all its ranks go through a loader together.
        rest: other arguments of Lightning's.
    """
    if mode == "predict":
        return None
    if isinstance(sampler, SequentialSampler):
        data: Any = sampler.data_source
        return DistributedSampler(data, num_replicas, rank, shuffle=False, drop_last=drop_last)
    if isinstance(sampler, RandomSampler) and (sampler.generator is not None or mode is not None):
        return _InOrder(sampler, num_replicas, rank, drop_last)
    return None


class _InOrder(DistributedSampler):
    """A reader's part of the order that one process would draw, drawn when that would; what is missing at the end are the first samples."""

    def __init__(self, sampler: RandomSampler, num_replicas: int, rank: int, drop_last: bool) -> None:
        super().__init__(sampler, num_replicas, rank, shuffle=False, drop_last=drop_last)  # type: ignore[arg-type]
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        first: list[int] = []
        for number, sample in enumerate(self._seeded()):
            if number < self.num_replicas:
                first.append(sample)
            if number % self.num_replicas == self.rank and number < self.total_size:
                yield sample
        missing = self.total_size - len(self.sampler)
        if self.rank >= self.num_replicas - missing:
            yield first[(self.rank + missing - self.num_replicas) % len(first)]

    def _seeded(self) -> RandomSampler:
        """One process draws a seed from torch's generator, whose state need not be the same on all readers."""
        own = self.sampler
        if own.generator is not None:
            return own
        seed = [int(torch.empty((), dtype=torch.int64).random_())]
        dist.broadcast_object_list(seed)
        generator = torch.Generator()
        generator.manual_seed(seed[0])
        return RandomSampler(own.data_source, own.replacement, own._num_samples, generator)


class _OverReaders:
    """Gathers what a metric holds over readers; copies of the metric have it as well, where a process group could not be copied."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def __call__(self, value: Tensor, group: Any = None) -> list[Tensor]:
        from torchmetrics.utilities.distributed import gather_all_tensors

        found: list[Tensor] = gather_all_tensors(value, group or self._mesh.group("batch"))
        return found

    def __deepcopy__(self, known: dict[int, Any]) -> _OverReaders:
        return self


def count_readers(module: nn.Module, mesh: Mesh) -> None:
    """Have metrics of torchmetrics inside a module sum over readers."""
    from torchmetrics import Metric

    for metric in module.modules():
        if not isinstance(metric, Metric) or metric.process_group is not None:
            continue
        if metric.dist_sync_fn is None or isinstance(metric.dist_sync_fn, _OverReaders):
            metric.dist_sync_fn = _OverReaders(mesh)
        else:  # a script's own, which is told
            metric.process_group = mesh.group("batch")


def seed_workers(dataloader: Any, reader: int) -> None:
    """Lightning's seeds for data loading workers, by reader instead of by rank."""
    from lightning.fabric.utilities.seed import pl_worker_init_function

    given = getattr(dataloader, "worker_init_fn", None)
    theirs = isinstance(given, partial) and given.func is pl_worker_init_function
    if (
        hasattr(dataloader, "worker_init_fn")
        and int(os.environ.get("PL_SEED_WORKERS", 0))
        and (given is None or theirs)
    ):
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=reader)
