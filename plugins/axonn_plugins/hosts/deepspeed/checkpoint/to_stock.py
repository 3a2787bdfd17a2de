"""A checkpoint of any grid as stock DeepSpeed would have saved it: one process writes the files, and needs no model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint.constants import CLIP_GRAD
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from torch import Tensor, nn

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common.portable import portable_in
from axonn_plugins.hosts.deepspeed.checkpoint.stock_plan import is_expert
from axonn_plugins.hosts.deepspeed.checkpoint.stock_reading import OPTIMIZER
from axonn_plugins.hosts.deepspeed.checkpoint.stock_refusals import STATES
from axonn_plugins.hosts.deepspeed.checkpoint.stock_states import StockStates
from axonn_tp.checkpoint import CheckpointError
from axonn_tp.checkpoint.dealt import DealtNames
from axonn_tp.checkpoint.planner import Place, Shard
from axonn_tp.checkpoint.ranks import Ranks
from axonn_tp.checkpoint.training import Reading
from axonn_tp.grid.layout import Layout

_HALF = (torch.float16, torch.bfloat16)


def to_stock(source: Path, target: Path, ranks: int, stage: int) -> str:
    """Write a checkpoint for `load_checkpoint` without the block.

    Args:
        source: a checkpoint that an engine of ours saved, as ``checkpoints/global_step100``, or plain PyTorch's `Run.save`.
        target: a folder that is not there yet; it gets the checkpoint by the same name, and ``latest``. Complete or absent.
        ranks: of the run that goes on. At stage 0 any number does.
        stage: its stage of ZeRO, 0 to 2.

    Returns:
        What was done, in words.

    Raises:
        ConfigError: a mistake of the user's, or what stock DeepSpeed keeps in another way.
    """
    if target.exists():
        raise ConfigError(f"{target} is there already; name a folder that is not")
    files = portable_in(source)
    if files is None:
        raise ConfigError(
            f"{source} is no checkpoint of the block's, with a folder axonn or a file state.pt; name one such as checkpoints/global_step100"
        )
    aside = target.with_name(f"{target.name}.incomplete")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        reading = Reading(files, Ranks(None))
        tag = os.path.basename(os.path.abspath(source))  # of "." as well
        _write(reading, source, aside / tag, ranks, stage)
        (aside / "latest").write_text(tag)
        aside.rename(target)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{target} cannot be made: {error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    dense = "; its masks do not go along, and what is pruned is trained again" if _pruned(reading.notes) else ""
    return f"{source} -> {target} (deepspeed, ZeRO-{stage}{f' on {ranks} ranks' if stage else ''}){dense}"


def _pruned(notes: dict[str, Any]) -> bool:
    return bool((notes.get("samo") or {}).get("pruned"))


def _write(reading: Reading, source: Path, folder: Path, ranks: int, stage: int) -> None:
    notes = reading.notes
    if any(is_expert(name) for name in notes["tensors"]):
        raise ConfigError(
            f"{source} has DeepSpeed's experts, and beside the folder axonn DeepSpeed's own files already; load it as it is"
        )
    if not notes.get("frozen", True):
        raise ConfigError(
            f"{source} was saved with exclude_frozen_parameters = True, and has not the whole model; save it without that"
        )
    if "optimizer" not in notes:
        raise ConfigError(f"{source} has no states of an optimizer; take its weights by --to hf")
    trained = [name for group in notes["optimizer"]["groups"] for name in group["params"]]
    kinds = {notes["tensors"][f"model.{name}"][1] for name in trained}
    if not stage and kinds & set(_HALF):
        raise ConfigError(
            f"{source} is in {', '.join(map(str, kinds))}, which stock keeps at ZeRO-0 in another way; pass --zero 1 or 2"
        )
    folder.mkdir(parents=True)
    stock = StockStates(_engine(notes, stage), _state(notes), reading, ranks)
    module = _module(reading)
    extra = notes["extra"] or {}  # of plain PyTorch anything, which stock returns by a name alone
    saved: dict[str, Any] = {
        **(extra if isinstance(extra, dict) else {"extra": extra}),
        **{"global_steps": 0, "skipped_steps": 0, **notes.get("counters", {})},
        **notes.get("data", {}),
        "module": module,
        "buffer_names": [name for name in module if name not in {*trained, *notes["model"]["aliases"]}],
        "shared_params": dict(notes["model"]["aliases"]),
        "optimizer": None if stage else stock.plain(0),
        "lr_scheduler": notes.get("scheduler"),
        "param_shapes": stock.param_shapes if stage else None,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": deepspeed.__version__,
    }
    torch.save(saved, folder / STATES)
    for rank in range(ranks if stage else 0):
        states = stock.partitions(rank)
        del states[CLIP_GRAD]  # the configuration's then
        prefix = "bf16_" if torch.bfloat16 in kinds else ""
        torch.save(
            {"optimizer_state_dict": states, "ds_config": {}, "ds_version": deepspeed.__version__},
            folder / f"{prefix}zero_pp_rank_{rank}_{OPTIMIZER}",
        )


def _module(reading: Reading) -> dict[str, Any]:
    """The serial model's state_dict."""
    found: dict[str, Any] = {}
    for full, (shape, dtype) in reading.notes["tensors"].items():
        if full.startswith("model."):
            found[full.removeprefix("model.")] = tensor = torch.empty(shape, dtype=dtype)
            reading.read({full: Shard(tensor, Layout(tuple(shape)))}, Place())
    model = reading.notes["model"]
    return found | {name: found[first] for name, first in model["aliases"].items()} | model["modules"]


def _engine(notes: dict[str, Any], stage: int) -> Any:
    """Stands for an engine of a dense model on data ranks alone."""
    kept = notes.get("loss_scaler") or _scaler_of(notes.get("loss_scale") or {})
    scaler: Any = (
        DynamicLossScaler(1.0, 2.0, 1000, 1.0, 1, False, torch.float16) if "scale_window" in kept else LossScaler(1.0)
    )
    vars(scaler).update(kept)
    groups = [{**group["options"], "params": ()} for group in notes["optimizer"]["groups"]]
    engine = SimpleNamespace(
        groups=None,
        _own_stage=stage,
        zero_round_robin_gradients=lambda: False,
        gradient_clipping=lambda: 0.0,
        optimizer=SimpleNamespace(
            param_groups=groups, loss_scaler=scaler, dynamic_loss_scale="scale_window" in kept, overflow=False
        ),
    )
    if hasattr(DeepSpeedEngine, "zero_parameter_alignment"):
        engine.zero_parameter_alignment = lambda: False
    return engine


def _scaler_of(scale: dict[str, Any]) -> dict[str, Any]:
    """A loss scale of plain PyTorch's as the numbers of DeepSpeed's scaler."""
    if not scale.get("dynamic"):
        return {"cur_scale": scale["scale"]} if scale else {}
    return {
        "cur_scale": scale["scale"],
        "scale_window": scale["growth_interval"],
        "min_scale": scale["least"],
        "cur_iter": scale["steps"],
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "delayed_shift": 1,
        "cur_hysteresis": 1,
        "consecutive_hysteresis": False,
    }


def _state(notes: dict[str, Any]) -> Any:
    """The parameters by the groups of the script."""

    def stored(name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return notes["tensors"][f"model.{name}"]

    def stand_in(name: str) -> Tensor:
        return torch.empty(0, dtype=stored(name)[1])

    groups = [group["params"] for group in notes["optimizer"]["groups"]]
    return SimpleNamespace(
        names=DealtNames(nn.Module()),
        pieces=[
            [SimpleNamespace(name=name, layout=Layout(tuple(stored(name)[0]))) for name in group] for group in groups
        ],
        parameters={name: stand_in(name) for group in groups for name in group},
    )
