"""Checkpoints of a pipeline: one set of files for all stages, read on other stages, grids and numbers of ranks.

Weights that are whole are written in DeepSpeed's files of layers, too. Where states are DeepSpeed's, or layers are split by the
script, all is in DeepSpeed's files alone, for as many stages and slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from axonn_plugins.config import ConfigError, TensorParallel
from axonn_plugins.hosts.common.portable import portable_in
from axonn_plugins.hosts.deepspeed.checkpoint.layer_names import LayerNames
from axonn_plugins.hosts.deepspeed.checkpoint.portable_files import PortableCheckpoints
from axonn_plugins.hosts.deepspeed.checkpoint.state import EngineState
from axonn_plugins.hosts.deepspeed.pipeline.ties import settle_loss
from axonn_plugins.hosts.deepspeed.states import OwnStates

_LOSS = "axonn_loss_fn"
"""Weights of a loss_fn in DeepSpeed's files, whose own are of layers alone."""


class StagedCheckpoints(OwnStates, PortableCheckpoints):
    """The part of a pipeline's engine that saves and loads."""

    _split: TensorParallel | None
    grid: Any

    def _portable_state(self) -> EngineState:
        return EngineState(self, LayerNames(self.module), apart=True)

    @property
    def _stock_alone(self) -> bool:
        return self._split is None and (not self._owns or self.grid.get_slice_parallel_world_size() > 1)

    def _write(self, save_dir: str, tag: str, client_state: dict, **keywords: Any) -> None:
        alone = self._stock_alone
        if alone and self._pruning is not None:
            raise ConfigError(
                "axonn.samo cannot be saved beside layers that the script has split over a model axis itself, whose masks differ between "
                "ranks; split them by axonn.tensor_parallel"
            )
        loss = settle_loss(self.module)
        in_files = client_state | ({_LOSS: loss} if loss else {})
        if not self._owns and alone:
            super()._write(save_dir, tag, in_files, **keywords)
            return
        if self._split is None:
            with self._with_states(self.optimizer.state_dict() if alone else None):
                super()._write(save_dir, tag, in_files, **keywords)
        if not alone:
            self._write_portable(Path(save_dir) / tag, client_state, **keywords)

    @contextmanager
    def _with_states(self, states: dict[str, Any] | None) -> Iterator[None]:
        """DeepSpeed's files have these states: it asks for them on some ranks, and they may be shared out over all."""
        before = self.optimizer
        self.optimizer = None if states is None else SimpleNamespace(state_dict=lambda: states)
        try:
            yield
        finally:
            self.optimizer = before

    def _read(
        self,
        load_dir: str,
        tag: str | None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple:
        """Read a checkpoint of any stages and grid, pruned or dense; of DeepSpeed's files weights from any stages.

        Raises:
            ConfigError: DeepSpeed's files are of other stages, and optimizer state is to be read.
        """
        rest = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn)
        if self.load_universal_checkpoint():  # whose tag DeepSpeed finds; no states of ours are in it
            return super()._read(load_dir, tag, *rest)
        if tag is None:
            return None, {}
        folder = Path(load_dir) / tag
        if portable_in(folder):
            return self._read_portable(folder, *rest)
        if self._split is not None:
            raise ConfigError(
                f"{folder} was written by another engine, whose files know one number of stages and ranks; load it with the block that wrote "
                "it, or start anew"
            )
        files = len(list(folder.glob("mp_rank_*_model_states.pt")))
        states = load_optimizer_states and not load_module_only
        if states and files not in (0, self.mp_world_size):
            stages = files * self.num_stages // self.mp_world_size
            raise ConfigError(
                f"{folder} was written on {stages} stages, where each has the optimizer state of its own layers, and this run has "
                f"{self.num_stages}; use {stages}, or load_optimizer_states=False, with which the weights are read"
            )
        found = super()._read(load_dir, tag, *rest)
        loss = (found[1] or {}).pop(_LOSS, None)
        if loss is not None and isinstance(self.module.loss_fn, nn.Module):
            self.module.loss_fn.load_state_dict(loss, strict=load_module_strict)
        if self._owns and not load_optimizer_states:
            self.optimizer.refresh_fp32_params()
        return found
