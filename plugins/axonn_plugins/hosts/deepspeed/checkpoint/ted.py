"""Checkpoints of TED: one that any tensor, expert and data degree can load, and beside it DeepSpeed's own files.

DeepSpeed's are those of a run without tensor parallelism on as many ranks: a stock engine of any ep_size and on any ranks reads the
weights, one of the same ep_size on as many the optimizer's states, too (ZeRO-1 and 2; ZeRO-0 in float32).
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.deepspeed.checkpoint.grid import _LAYOUTS, _PORTABLE, GridCheckpoints
from axonn_plugins.hosts.deepspeed.checkpoint.portable import PortableState
from axonn_plugins.hosts.deepspeed.checkpoint.stock_reading import STATES, StockReading, is_stock
from axonn_plugins.hosts.deepspeed.checkpoint.stock_states import save_states
from axonn_plugins.hosts.deepspeed.ted.layers import TedMoE
from axonn_tp import Grid, layout_of
from axonn_tp.checkpoint.dealt import DealtNames
from axonn_tp.grid.layout import Layout
from axonn_tp.layers.exports import as_shards
from ted_moe import Groups


class TedCheckpoints(GridCheckpoints):
    """The part of `TedEngine` that saves and loads."""

    groups: Groups
    _without_portable = "holds the weights alone"

    def _portable_state(self) -> PortableState:
        return PortableState(self, DealtNames(self.module))

    def _write(self, save_dir: str, tag: str, client_state: dict, **keywords: Any) -> None:
        """Both kinds of files."""
        folder = Path(save_dir) / tag
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        state, shapes = self._save_portable(folder / _PORTABLE, client_state), None
        if state is not None and (self._plain or self.zero_optimization()):
            shapes = save_states(self, folder, folder / _PORTABLE, state)
        self._save_stock(folder, {**client_state, "param_shapes": shapes})
        if dist.get_rank() == 0:
            (folder / _LAYOUTS).write_text(json.dumps(self._layouts()))

    def _read(self, load_dir: str, tag: str | None, *rest: Any, **keywords: Any) -> tuple:
        """What TED wrote under any degrees, or a stock engine without tensor parallelism."""
        if tag is None:
            return None, {}
        folder = Path(load_dir) / tag
        if (folder / _PORTABLE).is_dir() or is_stock(folder):
            return self._load_portable(folder, *rest, **keywords)
        raise ConfigError(
            f"{folder} is no checkpoint that was written under axonn.ted, nor by DeepSpeed-MoE without tensor parallelism; load it "
            "without the block, or start anew"
        )

    def _reading(self, state: PortableState, folder: Path, states: bool) -> Any:
        if (folder / _PORTABLE).is_dir():
            return super()._reading(state, folder, states)
        return StockReading(self, state, folder, states)

    def _consolidated_16bit_state_dict(self, *rest: Any, **keywords: Any) -> Any:
        """Refused: DeepSpeed's has no experts of other ranks.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "the model's weights would be without the experts of other ranks; call save_checkpoint, whose layer_*_expert_*.pt and "
            "mp_rank_00_model_states.pt hold whole weights"
        )

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def _save_stock(self, folder: Path, client_state: dict) -> None:
        """Files of ranks that hold the first replica."""
        if self.mesh.rank("data"):
            return
        with as_shards():
            held = self.module.state_dict(keep_vars=True)
        module = {name: self._whole(value, value) for name, value in held.items()}
        if self.mesh.rank("x") == 0 or not self.groups.topology.expert_tensor_parallel:
            self._save_experts(folder, module)
        if dist.get_rank() == 0:
            dense = {name: value for name, value in module.items() if ".deepspeed_experts." not in name}
            state = {
                **client_state,
                "module": dense,
                "buffer_names": self._get_buffer_names(),
                "optimizer": None,
                "lr_scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
                "skipped_steps": self.skipped_steps,
                "global_steps": self.global_steps,
                "global_samples": self.global_samples,
                "dp_world_size": self.mesh.grid.world,
                "mp_world_size": 1,
                "num_experts": self.num_experts,
                "ds_config": self.config,
                "ds_version": _version(),
            }
            torch.save(state, folder / STATES)

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
            torch.save(tensors, folder / file)

    @property
    def _plain(self) -> bool:
        return isinstance(self.optimizer, torch.optim.Optimizer)

    @torch.no_grad()
    def _whole(self, value: Any, parameter: Any) -> Any:
        """A tensor that lies like a parameter, whole over the tensor ranks; ranks of a tensor group call it together."""
        if not isinstance(value, Tensor):
            return value
        layout: Layout = layout_of(parameter)
        held = value.detach()
        if "x" not in {axis for _, axis in layout.split} or self.mesh.size("x") == 1:
            return held.cpu().clone()
        shards = [torch.empty_like(held) for _ in range(self.mesh.size("x"))]
        dist.all_gather(shards, held.contiguous(), group=self.mesh.group("x"))
        return replace(layout, home=()).assemble(shards, Grid(gx=len(shards))).cpu()


def _version() -> str:
    import deepspeed

    return deepspeed.__version__
