"""Checkpoints of an engine on the grid: one file for each (x, y, z), complete or absent, and never read into another layout."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups

from axonn_tp import Mesh, full_state_dict, layout_of
from plugins.config import ConfigError

_LAYOUTS = "axonn_layouts.json"


class GridCheckpoints(DeepSpeedEngine):
    """The part of `AxonnEngine` that saves and loads."""

    mesh: Mesh
    has_moe_layers: bool

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

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict | None = None,
        save_latest: bool = True,
        **keywords: Any,
    ) -> bool:
        """DeepSpeed's files, complete or absent: written aside, then renamed; the name in ``latest`` changes last."""
        tag = str(tag if tag is not None else f"global_step{self.global_steps}")
        aside = f"{tag}.incomplete"
        folder = Path(save_dir)
        first = dist.get_rank() == 0
        if first:
            shutil.rmtree(folder / aside, ignore_errors=True)
        dist.barrier()
        with self._without_experts():
            super().save_checkpoint(save_dir, aside, client_state or {}, save_latest=False, **keywords)
        if first:
            (folder / aside / _LAYOUTS).write_text(json.dumps(self._layouts()))
            replaced = folder / f"{tag}.replaced"
            for file in (folder / aside).iterdir():
                _flush(file)
            if (folder / tag).exists():
                shutil.rmtree(replaced, ignore_errors=True)
                (folder / tag).rename(replaced)
            (folder / aside).rename(folder / tag)
            _flush(folder)
            shutil.rmtree(replaced, ignore_errors=True)
            if save_latest:
                note = folder / "latest.incomplete"
                note.write_text(tag)
                _flush(note)
                note.replace(folder / "latest")
                _flush(folder)
        dist.barrier()
        return True

    def _layouts(self) -> dict[str, Any]:
        """The grid, and how every parameter lies on it, as JSON."""
        grid = self.mesh.grid
        sizes = {"gx": grid.gx, "gy": grid.gy, "gz": grid.gz, "gdata": grid.gdata}
        layouts = {name: str(layout_of(p)) for name, p in self.module.named_parameters()}
        return {"grid": sizes, "layouts": layouts}

    def _check_layouts(self, folder: Path) -> None:
        if not folder.is_dir():
            return
        note = folder / _LAYOUTS
        if not note.is_file():
            raise ConfigError(f"{folder} was written without the axonn block; load it without the block, or start anew")
        saved, present = json.loads(note.read_text()), self._layouts()
        if saved["grid"] != present["grid"]:
            was, now = (" ".join(f"{axis}={size}" for axis, size in side["grid"].items()) for side in (saved, present))
            raise ConfigError(
                f"{folder} was written on {was}, and this run has {now}; use the same gx, gy, gz and number of ranks"
            )
        for name, layout in present["layouts"].items():
            if saved["layouts"].get(name) != layout:
                raise ConfigError(
                    f"{folder} holds parameter {name} laid out otherwise; use the plan and the model it was written with"
                )

    def _copy_recovery_script(self, save_path: str) -> None:
        """DeepSpeed's zero_to_fp32.py does not know the grid; `save_16bit_model` writes whole weights."""

    def load_checkpoint(self, load_dir: str, tag: str | None = None, *rest: Any, **keywords: Any) -> tuple:
        """Load what `save_checkpoint` wrote on the same grid.

        Raises:
            ConfigError: it was written on another grid, by another plan, or without the block.
        """
        latest = Path(load_dir) / "latest"
        if tag is None and latest.is_file():
            tag = latest.read_text().strip()
        if tag is not None:
            folder = Path(load_dir) / str(tag)
            if not folder.exists() and folder.with_name(f"{tag}.replaced").exists():
                tag = f"{tag}.replaced"
                folder = Path(load_dir) / tag
            self._check_layouts(folder)
        with self._without_experts():
            return super().load_checkpoint(load_dir, tag, *rest, **keywords)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole model's weights, as the serial model names and shapes them."""
        dtype = torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else None
        full = full_state_dict(self.module, self.mesh, dtype)
        if exclude_frozen_parameters:
            frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
            full = {name: value for name, value in full.items() if name not in frozen}
        if dist.get_rank() == 0:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(full, Path(save_dir) / save_filename)
        dist.barrier()
        return True


def _flush(path: Path) -> None:
    """Make a file or a folder's entries survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
