"""Checkpoints by the serial model's names: read on other grids, stages of a pipeline and of ZeRO, pruned or dense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common.portable import PORTABLE, portable_in
from axonn_plugins.hosts.deepspeed.checkpoint.checked import CheckedCheckpoints
from axonn_plugins.hosts.deepspeed.checkpoint.state import EngineState
from axonn_tp.checkpoint import CheckpointError
from axonn_tp.checkpoint.training import Reading


class PortableCheckpoints(CheckedCheckpoints):
    """The part of an engine that writes and reads them."""

    def _portable_state(self) -> EngineState:
        return EngineState(self)

    def _write_portable(
        self, folder: Path, client_state: dict, exclude_frozen_parameters: bool = False, **keywords: Any
    ) -> EngineState:
        """Write them into a checkpoint's folder; returns what they hold.

        Args:
            folder: the checkpoint's.
            client_state: the script's.
            exclude_frozen_parameters: leave these out.
            keywords: of DeepSpeed's `save_checkpoint`.

        Raises:
            ConfigError: the optimizer's states cannot be split anew; the same on every rank.
        """
        try:
            state = self._portable_state()
            state.write(folder / PORTABLE, *state.collect(client_state, not exclude_frozen_parameters))
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        return state

    def _read_portable(
        self,
        folder: Path,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str, dict]:
        if custom_load_fn is not None:
            raise ConfigError(
                "custom_load_fn is for DeepSpeed's own files, which hold shards where weights are split; leave it out, and give whole tensors to "
                "engine.module.load_state_dict, which keeps this rank's shards of them, then in 16 bits call engine.optimizer.refresh_fp32_params()"
            )
        if (why := self._why_unreadable(folder)) is not None:
            raise ConfigError(f"{folder} {why}")
        states = load_optimizer_states and not load_module_only
        schedule = load_lr_scheduler_states and not load_module_only
        try:
            state = self._portable_state()
            reading = self._reading(state, folder, states)
            found = state.load(reading, states, schedule, not load_module_only, load_module_strict)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        return str(folder), found

    def _why_unreadable(self, folder: Path) -> str | None:
        """Why a checkpoint cannot be read here, and what to do; None where it can."""
        if portable_in(folder):
            return None
        return "was written without the axonn block; load it without the block, or start anew"

    def _reading(self, state: EngineState, folder: Path, states: bool) -> Any:
        """Open the files for `EngineState.load`."""
        return Reading(portable_in(folder) or folder, state.ranks, verified=True)
