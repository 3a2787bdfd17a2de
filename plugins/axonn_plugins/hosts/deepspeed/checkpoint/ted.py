"""Checkpoints of TED: one that any tensor, expert and data degree can load, and beside it DeepSpeed's own files.

DeepSpeed's are those of a run without tensor parallelism on as many ranks: a stock engine of any ep_size and on any ranks reads the
weights, one of the same ep_size on as many the optimizer's states, too (ZeRO-1 and 2; ZeRO-0 in float32).
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common.portable import PORTABLE
from axonn_plugins.hosts.deepspeed.checkpoint.grid import GridCheckpoints
from axonn_plugins.hosts.deepspeed.checkpoint.state import EngineState
from axonn_plugins.hosts.deepspeed.checkpoint.stock_refusals import STATES
from axonn_plugins.hosts.deepspeed.checkpoint.stock_states import save_states
from axonn_plugins.hosts.deepspeed.data_efficiency import parts_with_state
from axonn_plugins.hosts.deepspeed.ted.layers import TedMoE
from axonn_plugins.hosts.deepspeed.ted.on_mesh import experts_grid
from axonn_tp import layout_of
from axonn_tp.checkpoint.dealt import DealtNames
from axonn_tp.checkpoint.state import is_frozen
from axonn_tp.layers.exports import as_shards, whole_tensor
from ted_moe import Groups
from ted_moe.adapters import SpreadExperts


class TedCheckpoints(GridCheckpoints):
    """The part of `TedEngine` that saves and loads."""

    groups: Groups | None

    def _portable_state(self) -> EngineState:
        return EngineState(self, DealtNames(self.module))

    def _write(self, save_dir: str, tag: str, client_state: dict, **keywords: Any) -> None:
        """Both kinds of files; of others' experts, which DeepSpeed without the block has no files of, those of the grid."""
        if self._of_models:
            self._write_portable(Path(save_dir) / tag, client_state, **keywords)
            return
        folder = Path(save_dir) / tag
        state = self._write_portable(folder, client_state, **keywords)
        shapes = save_states(self, folder, folder / PORTABLE, state)
        self._save_stock(folder, {**client_state, "param_shapes": shapes}, **keywords)

    @property
    def _of_models(self) -> bool:
        """True if the experts are those of models, each a tensor of the serial model, and not DeepSpeed's."""
        return any(isinstance(module, SpreadExperts) for module in self.module.modules())

    def save_16bit_model(self, *rest: Any, **keywords: Any) -> bool:
        """Refused where experts are DeepSpeed's: one file has none of other ranks.

        Raises:
            ConfigError: they are.
        """
        if self._of_models:
            return super().save_16bit_model(*rest, **keywords)
        raise ConfigError(
            "the model's weights would be without the experts of other ranks; call save_checkpoint, whose layer_*_expert_*.pt and "
            "mp_rank_00_model_states.pt hold whole weights"
        )

    def _save_stock(
        self, folder: Path, client_state: dict, exclude_frozen_parameters: bool = False, **keywords: Any
    ) -> None:
        """Files of ranks that hold the first replica."""
        with as_shards():
            held = self.module.state_dict(keep_vars=True)
        if exclude_frozen_parameters:
            held = {name: value for name, value in held.items() if not is_frozen(value)}
        module = {name: self._whole(value) for name, value in held.items()}
        if self.groups is not None:
            on = self.mesh.over(experts_grid(self.groups.topology))
            if on.rank("x") == on.rank("data") == 0:
                self._save_experts(folder, module)
        if dist.get_rank() == 0:
            dense = {name: value for name, value in module.items() if ".deepspeed_experts." not in name}
            state = {
                **client_state,
                "module": dense,
                "buffer_names": self._get_buffer_names(),
                "optimizer": None,
                "lr_scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
                **{name: part.state_dict() for name, part in parts_with_state(self).items()},
                "skipped_steps": self.skipped_steps,
                "global_steps": self.global_steps,
                "global_samples": self.global_samples,
                "dp_world_size": self.mesh.grid.world,
                "mp_world_size": 1,
                "num_experts": self.num_experts,
                "ds_config": self._config.axonn_raw,
                "ds_version": deepspeed.__version__,
            }
            self.checkpoint_engine.save(state, str(folder / STATES))

    def _save_experts(self, folder: Path, module: dict[str, Any]) -> None:
        names = DealtNames(self.module)
        files: dict[str, dict[str, Any]] = defaultdict(dict)
        layers = [name for name, layer in self.module.named_modules() if isinstance(layer, TedMoE)]
        for name, value in module.items():
            before, _, after = names.outward(name).partition(".deepspeed_experts.")
            layer_name = before.removesuffix("deepspeed_moe.experts").removesuffix(".")
            if after and layer_name in layers:  # else it is another name of a layer
                layer = layers.index(layer_name)
                number = after.partition(".")[0]
                files[f"layer_{layer}_expert_{number}_{STATES}"][names.outward(name)] = value
        for file, tensors in files.items():
            self.checkpoint_engine.save(tensors, str(folder / file))

    @torch.no_grad()
    def _whole(self, value: Any) -> Any:
        """A tensor of the module's state, whole over the ranks that split it; every rank calls it."""
        if not isinstance(value, Tensor):
            return value
        layout = layout_of(value)
        if not layout.axes:
            return value.detach().cpu().clone()
        return whole_tensor(value, layout, self.mesh.over(layout.grid)).cpu()
