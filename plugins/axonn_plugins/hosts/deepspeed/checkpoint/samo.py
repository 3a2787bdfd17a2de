"""Checkpoints of `SamoEngine`, complete or absent: DeepSpeed's files with compressed state, and the masks beside them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.config import ConfigError
from axonn_plugins.config.samo import Samo
from axonn_plugins.hosts.deepspeed.checkpoint.checked import CheckedCheckpoints
from axonn_plugins.hosts.deepspeed.optim.samo import SamoOptimizer
from axonn_plugins.hosts.deepspeed.samo.pruning import Pruning


class SamoCheckpoints(CheckedCheckpoints):
    """The part of `SamoEngine` that saves and loads."""

    optimizer: SamoOptimizer
    _pruning: Pruning
    _samo: Samo

    def _prune(self, masks: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def _masks_file(self) -> tuple[str, bool]:
        """Its name, and whether this rank writes it."""
        return "axonn_samo.pt", dist.get_rank() == 0

    def _write(self, save_dir: str, tag: str, client_state: dict, **keywords: Any) -> None:
        super()._write(save_dir, tag, client_state, **keywords)
        name, writes = self._masks_file()
        if writes:
            torch.save(self._pruning.state_dict(self.optimizer.samo), Path(save_dir) / tag / name)

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
        """What was written on any number of ranks, sharded or not, or a dense run's checkpoint.

        The checkpoint's masks are taken, whatever the block says. A model that comes dense is pruned at once if its step is
        beyond `start_step`; a search for a ticket goes on.
        """
        rest = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn)
        if tag is None:
            return super()._read(load_dir, tag, *rest)
        masks = self._pruning.load_state_dict(_read(Path(load_dir) / tag / self._masks_file()[0]))
        self.optimizer.prune(masks)
        loaded = super()._read(load_dir, tag, *rest)
        if load_module_only or not load_optimizer_states:
            self.optimizer.refresh_fp32_params()
        if self._samo.search is None and (due := self._pruning.after(self.global_steps)) is not None:
            self._prune(due)
        return loaded


def _read(file: Path) -> dict[str, Any] | None:
    """The masks' file; None: the checkpoint is of a run without the block."""
    if not file.is_file():
        return None
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
        raise ConfigError(f'"{file}" is damaged and cannot be read as masks; load another checkpoint') from None
