"""The common part of Fabric's strategy and the Trainer's: the grid, readers of data, the split of a model, and sums."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common.elementwise import check_optimizer
from axonn_plugins.hosts.common.replicas import align_random_state, stop_sharing_samplers
from axonn_plugins.hosts.common.split_states import split_states
from axonn_plugins.hosts.lightning import patch, settings
from axonn_plugins.hosts.lightning.gradients import clip
from axonn_plugins.hosts.lightning.replicas import Readers, Replicas, own_samplers, seed_workers
from axonn_plugins.hosts.lightning.streams import dealt
from axonn_tp import GradScaler, Grid, LayerPlan, Mesh, auto_plan, parallelize

_meshes: dict[tuple[Any, Grid, str], Mesh] = {}
_split: WeakKeyDictionary[nn.Module, Mesh] = WeakKeyDictionary()


class AxonnStrategy:
    """Lightning's strategy for models in 3D parallel matrix multiplication × data; for `Trainer` and for `Fabric`.

    ``Trainer(strategy=AxonnStrategy(gx=2), devices=4)`` splits the model over x on pairs of devices, and the data over the
    two pairs. It becomes the Trainer's or Fabric's own kind of strategy when it is given to one of them.

    Ranks that differ only in x and y read the same data: `world_size`, samplers, `reduce` and `all_gather` count *readers*,
    gz·gdata of them; `global_rank` counts ranks.

    Args:
        gx: ranks along x, which splits output features and attention heads.
        gy: ranks along y, which splits input features.
        gz: ranks along z, which splits weights and data, as FSDP does; ``"all"`` for all ranks that x and y leave.
        plan: what layers become by name pattern, such as ``{"*.fc1": "normal", "*.fc2": "transposed"}``, or ``"auto"``.
        options: `axonn_tp.Options`, or a mapping of some of them.
        state_dict_type: ``"full"``: a checkpoint is one file as of one process, written by rank 0. ``"sharded"``: a folder into which
            every rank writes its part. Both are read on any grid.
        process_group_backend: torch's; by default the device's.
        timeout: of collectives.
        lightning: the base class's, which Lightning fills in itself.

    Raises:
        ConfigError: an argument is wrong, or the sizes do not divide the devices; before processes are started.
    """

    if TYPE_CHECKING:
        accelerator: Any
        cluster_environment: Any
        parallel_devices: list[torch.device] | None
        global_rank: int
        local_rank: int
        node_rank: int

    _launcher_class: Any
    _predicting = False

    def __init__(
        self,
        gx: int = 1,
        gy: int = 1,
        gz: int | str = 1,
        plan: str | Mapping[str, str | LayerPlan | dict] = "auto",
        options: Any = None,
        state_dict_type: str = "full",
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **lightning: Any,
    ) -> None:
        self.settings = settings.parse(gx, gy, gz, plan, options, state_dict_type)
        self._mesh: Mesh | None = None
        self._num_nodes = 1
        self._backend, self._timeout, self._lightning = process_group_backend, timeout, lightning
        patch.arm()
        if type(self) is not AxonnStrategy:
            self._join()

    def become(self, kind: type) -> None:
        """Be Fabric's or the Trainer's strategy, as the one that it was given to asks."""
        if type(self) is AxonnStrategy:
            self.__class__ = kind
            self._join()

    def _join(self) -> None:
        """Initialise the base class."""
        super().__init__(**self._lightning)

    # Ranks

    @property
    def mesh(self) -> Mesh:
        """The mesh of the run.

        Raises:
            ConfigError: there is none before `Fabric.launch` or `Trainer.fit`.
        """
        if self._mesh is None:
            raise ConfigError(
                "the strategy has no mesh before its processes run; call Fabric.launch() or Trainer.fit() first"
            )
        return self._mesh

    @property
    def grid(self) -> Grid:
        """The sizes of all four axes."""
        return self.settings.grid(self.num_nodes * self.num_processes)

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Nodes of the run."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks of a node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def world_size(self) -> int:
        """Number of ranks that read different data: batch sizes are divided by it."""
        return self.grid.batch

    @property
    def reader(self) -> int:
        """Which of the readers this rank is."""
        at = self.grid.coordinates(self.global_rank)
        return at["z"] + self.grid.gz * at["data"]

    @property
    def is_distributed(self) -> bool:
        """True if there are several readers; Lightning asks this for samplers and metrics."""
        return self.grid.batch > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Arguments of samplers: the number of readers, and this rank's number among them; None where all ranks read all data."""
        return {"num_replicas": Readers(self.grid.batch), "rank": self.reader} if self.grid.batch > 1 else None

    @property
    def process_group_backend(self) -> str | None:
        """The backend of the process group."""
        return self._backend

    def set_world_ranks(self) -> None:
        """Tell Lightning's environment this rank's number."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        from lightning.fabric.utilities.rank_zero import rank_zero_only as own

        own.rank = rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    _set_world_ranks = set_world_ranks

    def _configure_launcher(self) -> None:
        self.settings.grid(self.num_nodes * self.num_processes)
        self._launcher = self._launcher_class(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Start the process group, and make the mesh."""
        super().setup_environment()  # type: ignore[misc]
        grid, device = self.grid, self.root_device
        self.set_world_ranks()
        self._backend = self._backend or _get_default_process_group_backend_for_device(device)
        bound = {} if device.type == "cpu" else {"device_id": device}
        _init_dist_connection(self.cluster_environment, self._backend, timeout=self._timeout, **bound)
        key = dist.group.WORLD, grid, str(device)
        if key not in _meshes:
            _meshes[key] = Mesh(grid, str(device))
        self._mesh = _meshes[key]
        self.replicas = Replicas(self._mesh)
        own_samplers(self._mesh)
        align_random_state(self._mesh)

    def teardown(self) -> None:
        """Let go of what counts readers; the model stays split, on its device."""
        if self._mesh is not None:
            stop_sharing_samplers(self._mesh)
        self.cluster_environment.teardown()
        self._chosen_precision().teardown()
        self.accelerator.teardown()

    def _chosen_precision(self) -> Any:
        raise NotImplementedError

    # Models

    def split(self, module: nn.Module, optimizers: Iterable[Optimizer] = (), sync_batch_norm: bool = False) -> None:
        """Split a model over the mesh, in place; optimizers that hold its parameters keep holding them.

        Raises:
            ConfigError: it cannot be split so, or is split already on another grid.
        """
        optimizers = list(optimizers)
        if self.grid.world > self.grid.gdata:
            for optimizer in optimizers:
                check_optimizer(optimizer)
        if module in _split:
            if _split[module] is not self.mesh:
                raise ConfigError(
                    f"the model is split on {_split[module].grid} already and this run is on {self.grid}; make the model anew, and load its checkpoint"
                )
        else:
            self._parallelize(module, sync_batch_norm)
            _split[module] = self.mesh
        for optimizer in optimizers:
            split_states(optimizer, self.mesh)
        module.to(self.root_device)
        self._scale_together()

    def _parallelize(self, module: nn.Module, sync_batch_norm: bool) -> None:
        options = replace(
            self.settings.options, sync_batch_norm=self.settings.options.sync_batch_norm or sync_batch_norm
        )
        frozen = {name for name, p in module.named_parameters() if not p.requires_grad and p.is_floating_point()}
        try:
            plan = self.settings.plan
            if plan == "auto":
                plan, report = self._auto_plan(module, options)
                if self.global_rank == 0:
                    print(report, file=sys.stderr, flush=True)
            # A layer that is frozen now may be trained later, and its gradients need their hooks then.
            _train(module, frozen, True)
            parallelize(module, self.mesh, plan, options)
        except ValueError as error:
            raise ConfigError(f"AxonnStrategy: {error}") from None
        finally:
            _train(module, frozen, False)

    def _auto_plan(self, module: nn.Module, options: Any) -> Any:
        return auto_plan(module, self.mesh.grid, None, options)

    def _scale_together(self) -> None:
        """A GradScaler that all ranks step alike in the place of Lightning's."""
        precision = self._chosen_precision()
        theirs = getattr(precision, "scaler", None)
        if theirs is not None and not isinstance(theirs, GradScaler):
            precision.scaler = GradScaler(
                self.mesh,
                init_scale=theirs.get_scale(),
                growth_factor=theirs.get_growth_factor(),
                backoff_factor=theirs.get_backoff_factor(),
                growth_interval=theirs.get_growth_interval(),
                enabled=theirs.is_enabled(),
            )

    def clip(self, parameters: Iterable[Any], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that the whole model's norm is at most `max_norm`.

        Args:
            parameters: those that count.
            max_norm: the largest norm.
            norm_type: 2 or infinity.

        Returns:
            The norm before.

        Raises:
            ConfigError: it is another norm.
        """
        return clip(parameters, self.mesh, max_norm, norm_type)

    def _init_context(self, empty: bool | None) -> AbstractContextManager:
        """Models are made on the CPU, or on the meta device, and reach their device when they are split."""
        stack = ExitStack()
        stack.enter_context(torch.device("meta" if empty else "cpu"))
        return stack

    # Collectives

    def _readers(self, group: Any) -> Any:
        """The readers' group where Lightning says all ranks, which it does by naming their group, too."""
        every = group is None or group is dist.group.WORLD
        return self.mesh.group("batch") if every and self._mesh is not None else group

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor reduced over readers, so that no replica counts twice; anything else is returned."""
        if not isinstance(tensor, Tensor):
            return tensor
        return _sync_ddp_if_available(tensor, self._readers(group), reduce_op=reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all readers, stacked; the tensor itself where there is one reader."""
        chosen = self._readers(group)
        if self._mesh is not None and chosen is self.mesh.group("batch") and self.mesh.size("batch") == 1:
            return tensor
        return _all_gather_ddp_if_available(tensor, group=chosen, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """True if all ranks, or any, decide so."""
        if self._mesh is None:
            return decision
        found = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(found, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(found)

    def barrier(self, *rest: Any, **named: Any) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            dist.barrier(device_ids=None if self.root_device.type == "cpu" else [self.root_device.index])

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """A rank's object on all ranks."""
        if not dist.is_initialized():
            return obj
        found = [obj]
        dist.broadcast_object_list(found, src)
        return found[0]

    def process_dataloader(self, dataloader: Any) -> Any:
        """Have workers draw by reader, and readers of one stream take its batches in turns."""
        seed_workers(dataloader, self.reader)
        return dealt(dataloader, lambda: self._mesh, self.grid.batch, self._predicting)


def _train(module: nn.Module, names: set[str], trained: bool) -> None:
    for name, parameter in module.named_parameters():
        if name in names:
            parameter.requires_grad_(trained)
