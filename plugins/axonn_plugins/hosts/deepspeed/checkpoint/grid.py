"""Checkpoints of an engine on the grid, complete or absent.

The same grid resumes from DeepSpeed's files, one for each (x, y, z), another one from what `PortableState` wrote beside them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.deepspeed.checkpoint.portable import PortableState
from axonn_plugins.hosts.deepspeed.states import OwnStates
from axonn_plugins.hosts.deepspeed.whole_parameters import ShardShapes, mark
from axonn_tp import full_state_dict, layout_of
from axonn_tp.checkpoint import CheckpointError
from axonn_tp.checkpoint.training import Reading
from axonn_tp.layers.exports import as_shards

_LAYOUTS, _PORTABLE = "axonn_layouts.json", "axonn"


class GridCheckpoints(OwnStates):
    """The part of `AxonnEngine` that saves and loads."""

    _splits: bool
    has_moe_layers: bool
    _without_portable = "resumes on the same grid only"

    @contextmanager
    def _own_groups(self) -> Iterator[None]:
        """DeepSpeed looks its groups up anew at every step; another engine of the process may have put its own there."""
        before, groups.mpu = groups.mpu, self.mpu
        try:
            yield
        finally:
            groups.mpu = before

    def _configure_checkpointing(self, *rest: Any) -> None:
        super()._configure_checkpointing(*rest)
        mark(self.module.parameters(), self.mesh)
        self.save_non_zero_checkpoint = self.mesh.rank("data") == 0

    @contextmanager
    def _without_experts(self) -> Iterator[None]:
        """Checkpoints are written as for a model without experts: every file already holds its own shard."""
        before, self.has_moe_layers = self.has_moe_layers, False
        try:
            with self._own_groups():
                yield
        finally:
            self.has_moe_layers = before

    @contextmanager
    def _without_optimizer(self) -> Iterator[None]:
        before, self.optimizer = self.optimizer, None
        try:
            yield
        finally:
            self.optimizer = before

    def _write(self, save_dir: str, tag: str, client_state: dict, **keywords: Any) -> None:
        if not self._owns:
            with self._without_experts(), as_shards():
                super()._write(save_dir, tag, client_state, **keywords)
        elif not self._splits:
            # Whole weights, for DeepSpeed without the block.
            with self._without_optimizer():
                super()._write(save_dir, tag, client_state, **keywords)
        self._save_portable(Path(save_dir) / tag / _PORTABLE, client_state)
        if dist.get_rank() == 0:
            (Path(save_dir) / tag / _LAYOUTS).write_text(json.dumps(self._layouts()))

    def _portable_state(self) -> PortableState:
        return PortableState(self)

    def _save_portable(self, folder: Path, client_state: dict) -> PortableState | None:
        """Write the portable files; returns what they hold, if they can be."""
        state = self._portable_state()
        try:
            collected = state.collect(client_state)
        except CheckpointError as error:
            if self._owns:
                raise ConfigError(str(error)) from None
            if dist.get_rank() == 0:
                print(f"axonn: this checkpoint {self._without_portable}: {error}", file=sys.stderr, flush=True)
            return None
        state.write(folder, *collected)
        return state

    def _layouts(self) -> dict[str, Any]:
        """The grid, how every parameter lies on it, and the stage of ZeRO, as JSON."""
        layouts = {name: str(layout_of(p)) for name, p in self.module.named_parameters()}
        return {"grid": asdict(self.mesh.grid), "layouts": layouts, "stage": self.zero_optimization_stage()}

    def _same_layouts(self, folder: Path) -> bool:
        """Whether DeepSpeed's files are of this grid, plan and stage.

        Raises:
            ConfigError: they are not, and there are no portable ones.
        """
        note = folder / _LAYOUTS
        if self._owns and (folder / _PORTABLE).is_dir():
            return False
        if self._owns and not self._splits:
            return True
        if not note.is_file():
            raise ConfigError(f"{folder} was written without the axonn block; load it without the block, or start anew")
        saved, present = json.loads(note.read_text()), self._layouts()
        if saved == present:
            return True
        if not (folder / _PORTABLE).is_dir():
            was, now = (" ".join(f"{axis}={size}" for axis, size in side["grid"].items()) for side in (saved, present))
            raise ConfigError(
                f"{folder} was written on {was} and can be read there only, and this run has {now}; use the same sizes, plan and ZeRO stage"
            )
        return False

    def _load_portable(
        self,
        folder: Path,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str, dict]:
        if not load_module_strict or custom_load_fn is not None:
            raise ConfigError(
                f"load_module_strict=False and custom_load_fn need the grid that {folder} was written on; leave them out, or use that grid"
            )
        states = load_optimizer_states and not load_module_only
        schedule = load_lr_scheduler_states and not load_module_only
        try:
            state = self._portable_state()
            reading = self._reading(state, folder, states)
            return str(folder), state.load(reading, states, schedule, not load_module_only)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None

    def _reading(self, state: PortableState, folder: Path, states: bool) -> Any:
        """What `PortableState.load` reads."""
        return Reading(folder / _PORTABLE, state.ranks, verified=True)

    def _copy_recovery_script(self, save_path: str) -> None:
        """DeepSpeed's zero_to_fp32.py does not know the grid; `save_16bit_model` writes whole weights."""

    def _get_zero_param_shapes(self) -> Any:
        return ShardShapes()

    def _read(self, load_dir: str, tag: str | None, *rest: Any, **keywords: Any) -> tuple:
        """On the same grid or on another one, by another plan or ZeRO stage."""
        if self._splits and keywords.get("custom_load_fn", rest[4] if len(rest) > 4 else None) is not None:
            raise ConfigError(
                "custom_load_fn would be given shards, which DeepSpeed's files hold under axonn.tensor_parallel; leave it out, and give whole "
                "tensors to engine.module.load_state_dict, which keeps this rank's shards of them"
            )
        if tag is not None and not self._same_layouts(Path(load_dir) / tag):
            return self._load_portable(Path(load_dir) / tag, *rest, **keywords)
        if self._owns and tag is not None:
            assert self.composition is not None
            self.composition.forget_masks()
        with self._without_experts(), as_shards():
            return super()._read(load_dir, tag, *rest, **keywords)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole model's weights on rank 0, as the serial model names and shapes them, None elsewhere; every rank calls it."""
        dtype = torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else None
        full = full_state_dict(self.module, self.mesh, dtype)
        if exclude_frozen_parameters:
            frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
            full = {name: value for name, value in full.items() if name not in frozen}
        return full if dist.get_rank() == 0 else None

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole model's weights, as the serial model names and shapes them."""
        full = self._consolidated_16bit_state_dict(exclude_frozen_parameters)
        if dist.get_rank() == 0:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(full, Path(save_dir) / save_filename)
        dist.barrier()
        return True
