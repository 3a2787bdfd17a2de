"""Systems at work on one model, under any host: what becomes of its gradients, its optimizer's states and its checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import samo
from axonn_plugins import __version__
from axonn_plugins.config import Axonn, ConfigError
from axonn_plugins.config.systems import REGISTERED
from axonn_plugins.hosts.host import Gradient, Host, System
from axonn_plugins.samo.pruning import Masks, Pruning
from axonn_tp import layout_of
from axonn_tp.comm.gradients import sum_ranks


class Composition:
    """The systems of a block whose optimizer is `samo.Optimizer`.

    Args:
        block: the block.
        stage: of ZeRO: 1 shares states out over the ranks that sum a parameter's gradients, 2 gradients as well.
        host: what trains; its model is split already.
        tables: names of parameters that are tables of embeddings, though their modules are no `nn.Embedding`.

    Attributes:
        pruning: SAMO's; None where nothing is pruned.
        systems: those that others have registered, by key.
        optimizer: known from `attach` on.
    """

    optimizer: samo.Optimizer

    def __init__(self, block: Axonn, stage: int, host: Host, tables: Collection[str] = ()) -> None:
        self.block, self.host, self._tables = block, host, tables
        self.stage = max(stage, int(block.samo is not None and block.samo.shard))
        self.pruning: Pruning | None = None
        self.systems: dict[str, System] = {
            key: REGISTERED[key].system(settings, host) for key, settings in block.others.items()
        }
        self._masks: Masks | None = None

    def settings(
        self, trained: set[nn.Parameter], names: dict[nn.Parameter, str], masks: Masks | None = None
    ) -> dict[str, Any]:
        """Arguments of `samo.Optimizer`; every rank calls it.

        Args:
            trained: the parameters that the optimizer has.
            names: of all of the model's.
            masks: by which it is pruned already, of this rank's parts; None: as the block says for the first step.

        Raises:
            ConfigError: the model cannot be pruned so; the same on every rank.
        """
        host, tile, offload = self.host, self._tile, self.block.offload_optimizer
        size = max((parameter.element_size() for parameter in trained), default=0)
        if self.block.samo is not None:
            self.pruning = Pruning(
                self.block.samo, host.model, trained, host.mesh, names, host.stages_with, self._tables
            )
            self._masks = self.pruning.first() if masks is None else masks
        return {
            "masks": self._masks,
            "group": lambda parameter: sum_ranks(parameter, host.mesh),
            "stage": self.stage,
            "host": offload is not None,
            "norm": self._square_of_all,
            "mesh": host.mesh,
            "gather_ahead": self._gathers_ahead(),
            **({} if tile is None else {"tile_size": tile}),
            **({} if offload is None else {"bucket_bytes": offload.coarsening * offload.bucket_size * size}),
        }

    def _gathers_ahead(self) -> bool:
        """True if the block says so.

        Raises:
            ConfigError: it does, and the model has what reads weights and cannot wait.
        """
        if not self.block.overlap_param_gather:
            return False
        if any(isinstance(module, torch.jit.ScriptModule) for module in self.host.model.modules()):
            raise ConfigError(
                "axonn.overlap_param_gather has whoever uses a weight wait for it, and the model has a torch.jit.ScriptModule, which does not "
                "ask; leave it out, or that module as it was written"
            )
        return True

    @property
    def _tile(self) -> int | None:
        """Elements that a step updates at a time, if the block says so."""
        offload, experts = self.block.offload_optimizer, self.block.ted
        given = experts is not None and "tile_size" in experts.model_fields_set
        sizes = [experts.tile_size] if experts is not None and given and experts.tile_size is not None else []
        if offload is not None:
            # Two tiles are on the device, each with what the optimizer's arithmetic allocates.
            sizes.append(offload.bucket_size // 4)
        return min(sizes, default=None)

    def attach(self, optimizer: samo.Optimizer) -> None:
        """Take part in the steps of the optimizer that was made of `settings`."""
        self.optimizer = optimizer
        if self.systems:
            optimizer.on_gradients.append(self._hand_out_gradients)
        if self._masks is not None:
            self._note(self._masks)
        pruning = self.pruning
        if pruning is not None:
            optimizer.holds.append(lambda scale: pruning.hold(self.host.steps, optimizer, scale))

    def _square_of_all(self, squares: dict[str, Tensor]) -> Tensor:
        """The square of the whole model's norm, in which each parameter counts once."""
        named = {entry.name: entry.parameter for entry in self.optimizer.entries}
        device = self.host.mesh.device
        every = [square.to(device, torch.float64) for square in squares.values()]
        counted = torch.tensor([self.host.counts(named[name]) for name in squares], device=device)
        held = torch.stack(every) if every else torch.zeros(0, dtype=torch.float64, device=device)
        # What is not finite counts on every rank: only one replica may have it.
        total = torch.where(counted.bool() | ~held.isfinite(), held, 0).sum()
        dist.all_reduce(total)
        return total

    def _hand_out_gradients(self) -> None:
        for system in self.systems.values():
            system.gradients(self._gradients())

    def _gradients(self) -> Iterator[Gradient]:
        scale = 1.0 if self.optimizer.loss_scale is None else self.optimizer.loss_scale.scale
        for entry, begin, values in self.optimizer.reduced():

            def select(local: Tensor, entry: Any = entry, begin: int = begin, count: int = values.numel()) -> Tensor:
                return entry.read(local, begin, begin + count)

            yield Gradient(entry.name, entry.parameter, values, scale, select, self.host.mesh)

    # Steps

    def stepped(self) -> None:
        """The optimizer has made a step, or skipped it; every rank calls it."""
        for system in self.systems.values():
            system.stepped()
        self.prune_when_due()

    def prune_when_due(self) -> None:
        """Prune, if so many steps are taken; every rank calls it."""
        if self.pruning is None:
            return
        masks = self.pruning.after(self.host.steps)
        if masks is not None:
            self.optimizer.prune(masks)
            self._note(masks)
        self.optimizer.watch(self.pruning.watched(self.host.steps))

    def _note(self, masks: Masks) -> None:
        """Note that the model is pruned; rank 0 prints what its part keeps, by layer, and writes what the model keeps."""
        assert self.pruning is not None
        self.pruning.take(masks)
        self.pruning.report(masks, self.host.steps)
        if dist.get_rank() == 0:
            table = samo.sparsity_table(masks, self.pruning.parameters.items())
            size = f"{self.optimizer.nbytes / 2**20:,.1f} MiB of weights, gradients and state"
            parts = [p for name, p in self.pruning.parameters.items() if name in masks]
            if any(layout_of(part).serial_shape != part.shape for part in parts):
                size += (
                    ' on rank 0, whose part of the weights this is ("report" in the block writes a file on all of them)'
                )
            print(
                f"axonn {__version__}: SAMO: pruned after step {self.host.steps}; {size}\n{table}",
                file=sys.stderr,
                flush=True,
            )

    # Checkpoints

    def forget_masks(self) -> None:
        """Be dense, as a checkpoint that is to be read; every rank calls it."""
        if self.pruning is not None:
            self.optimizer.zero_grad()
            self.prune(self.pruning.forget())

    def prune(self, masks: Masks) -> None:
        """Prune as a checkpoint is what the optimizer has; of what else is pruned `pruning` keeps the masks. Every rank calls it."""
        held = {self.optimizer.names[one] for group in self.optimizer.param_groups for one in group["params"]}
        self.optimizer.prune({name: mask for name, mask in masks.items() if name in held})

    def loaded(self) -> None:
        """A checkpoint has been read: gradients of before are forgotten, and a model that came dense is pruned if its step is beyond `start_step`."""
        self.optimizer.zero_grad()
        pruning = self.pruning
        if pruning is None:
            return
        if pruning.pruned:
            self.optimizer.watch(pruning.watched(self.host.steps))
        elif pruning.block.search is None:
            self.prune_when_due()

    def state_dict(self) -> dict[str, Any]:
        """States of others' systems, by key."""
        return {key: system.state_dict() for key, system in self.systems.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; a system that was not there begins anew."""
        for key, system in self.systems.items():
            if key in state:
                system.load_state_dict(state[key])
