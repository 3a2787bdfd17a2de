"""Checkpoints of an engine on the grid, complete or absent.

Weights that are whole are written for DeepSpeed without the block, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups

from axonn_plugins.hosts.common.complete import everyone
from axonn_plugins.hosts.common.portable import portable_in
from axonn_plugins.hosts.deepspeed.checkpoint.portable_files import PortableCheckpoints
from axonn_plugins.hosts.deepspeed.checkpoint.state import EngineState
from axonn_plugins.hosts.deepspeed.checkpoint.stock_reading import StockReading
from axonn_plugins.hosts.deepspeed.checkpoint.stock_refusals import why_unreadable
from axonn_plugins.hosts.deepspeed.states import OwnStates
from axonn_plugins.observe.files import complete
from axonn_tp import full_state_dict, layout_of
from axonn_tp.checkpoint.dealt import DealtNames


class GridCheckpoints(OwnStates, PortableCheckpoints):
    """The part of `AxonnEngine` that saves and loads."""

    _splits: bool

    def _write(self, save_dir: str, tag: str, client_state: dict, **keywords: Any) -> None:
        if not self._splits:
            with self._as_without_block():
                super()._write(save_dir, tag, client_state, **keywords)
        self._write_portable(Path(save_dir) / tag, client_state, **keywords)

    @contextmanager
    def _as_without_block(self) -> Iterator[None]:
        """DeepSpeed looks its groups up anew, where another engine of the process may have put its own; the states are ours."""
        unit, optimizer = groups.mpu, self.optimizer
        groups.mpu, self.optimizer = self.mpu, None
        try:
            yield
        finally:
            groups.mpu, self.optimizer = unit, optimizer

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
        """On the same grid or on another one, by another plan or ZeRO stage."""
        rest = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn)
        folder = None if tag is None else Path(load_dir) / tag
        if folder is None:
            return None, {}
        # DeepSpeed's own reading knows weights that are missing, and no states but its own.
        plain = load_module_strict and custom_load_fn is None
        if self._splits or portable_in(folder) or (plain and why_unreadable(folder) is None):
            return self._read_portable(folder, *rest)
        assert self.composition is not None
        self.composition.forget_masks()
        found = super()._read(load_dir, tag, *rest)
        if not load_optimizer_states:
            self.optimizer.refresh_fp32_params()
        return found

    def _why_unreadable(self, folder: Path) -> str | None:
        return None if portable_in(folder) else why_unreadable(folder)

    def _reading(self, state: EngineState, folder: Path, states: bool) -> Any:
        """Files of ours, or a stock engine's."""
        if portable_in(folder):
            return super()._reading(state, folder, states)
        return StockReading(self, state, folder, states)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole model's weights, as the serial model names and shapes them; rank 0 alone has them whole.

        Raises:
            ConfigError: the file cannot be written; the same on every rank.
        """
        dtype = torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else None
        full = full_state_dict(self.module, self.mesh, dtype)
        if exclude_frozen_parameters:
            named = [(name, p, layout_of(p)) for name, p in self.module.named_parameters()]
            names, frozen = DealtNames(self.module), set[str]()
            for name, parameter, layout in named:
                if not parameter.requires_grad:
                    homes = layout.homes(layout.grid or self.mesh.grid)
                    frozen |= {names.outward(name, home) for home in range(homes)}
            full = {name: value for name, value in full.items() if name not in frozen}
        file = Path(save_dir) / save_filename

        def write() -> None:
            file.parent.mkdir(parents=True, exist_ok=True)
            with complete(file) as aside:
                torch.save(full, aside)

        everyone(write if dist.get_rank() == 0 else lambda: None)
        return True
