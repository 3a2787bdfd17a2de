"""Checkpoints of a pipeline whose stages are split, pruned or have states of their own: by the serial model's names alone.

So they are read on other stages, grids and numbers of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.deepspeed.checkpoint.checked import CheckedCheckpoints
from axonn_plugins.hosts.deepspeed.checkpoint.layer_names import LayerNames
from axonn_plugins.hosts.deepspeed.checkpoint.portable import PortableState
from axonn_plugins.hosts.deepspeed.whole_parameters import ShardShapes, mark
from axonn_tp import Mesh
from axonn_tp.checkpoint import CheckpointError
from axonn_tp.checkpoint.training import Reading

_PORTABLE = "axonn"


class StagedCheckpoints(CheckedCheckpoints):
    """The part of a pipeline's engine that saves and loads."""

    mesh: Mesh

    def _configure_checkpointing(self, *rest: Any) -> None:
        super()._configure_checkpointing(*rest)
        mark(self.module.parameters(), self.mesh)

    def _get_zero_param_shapes(self) -> Any:
        return ShardShapes()

    def _portable_state(self) -> PortableState:
        return PortableState(self, LayerNames(self.module), apart=True)

    def _write(self, save_dir: str, tag: str, client_state: dict, **keywords: Any) -> None:
        """One set of files for all stages."""
        state = self._portable_state()
        try:
            state.write(Path(save_dir) / tag / _PORTABLE, *state.collect(client_state))
        except CheckpointError as error:
            raise ConfigError(str(error)) from None

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
        """What was written on any stages and grid, pruned or dense."""
        if tag is None:
            return None, {}
        folder = Path(load_dir) / tag
        if not (folder / _PORTABLE).is_dir():
            raise ConfigError(
                f"{folder} was written by another engine, whose files know one number of stages and ranks; load it with the block that wrote "
                "it, or start anew"
            )
        if not load_module_strict or custom_load_fn is not None:
            raise ConfigError(
                "load_module_strict=False and custom_load_fn are for DeepSpeed's own files; leave them out under axonn.pipeline"
            )
        states = load_optimizer_states and not load_module_only
        schedule = load_lr_scheduler_states and not load_module_only
        try:
            state = self._portable_state()
            reading = Reading(folder / _PORTABLE, state.ranks, verified=True)
            found = state.load(reading, states, schedule, not load_module_only)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        return str(folder), found
