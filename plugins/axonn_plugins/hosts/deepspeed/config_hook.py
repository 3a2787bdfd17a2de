"""The hook that runs when DeepSpeed parses a configuration with the ``"axonn"`` block.

The block is checked against itself, against the rest of the configuration and against the number of ranks, before
any group is made; DeepSpeed's batch arithmetic is given the gz·gdata ranks that read different data; and
`deepspeed.initialize` is led to the engine that obeys it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups

from axonn_plugins import build_locks, config, names
from axonn_plugins.config import compose
from axonn_plugins.hosts.deepspeed import engines, states_config
from axonn_plugins.hosts.deepspeed.sections import of_old_forms, refuse, section
from axonn_plugins.hosts.deepspeed.spellings import as_understood

# Not in older versions of DeepSpeed.
_DUAL_PIPE = getattr(deepspeed, "DualPipeVEngine", None)
_MISTAKES, _OTHERS_SECONDS = "axonn/mistakes", 5.0
_SYSTEMS = ("pipeline", "offload_optimizer", "samo", "tensor_parallel", "ted", "goldfish")
# The packages of ours that each key imports.
_PACKAGES = {
    "offload_optimizer": ("axonn_tp", "samo", "ted_moe"),
    "samo": ("axonn_tp", "samo", "ted_moe"),
    "tensor_parallel": ("axonn_tp", "ted_moe"),
    "ted": ("axonn_tp", "ted_moe"),
}


def configure(parsed_config: Any, raw: dict[str, Any], mpu: Any) -> tuple[Any, dict[str, Any]]:
    """Check the block of `raw` and get ready for the engine that obeys it.

    Args:
        parsed_config: the DeepSpeedConfig under construction; gets the attributes ``axonn`` and ``axonn_raw``.
        raw: the whole configuration.
        mpu: the user's model parallel unit.

    Returns:
        The mpu with which DeepSpeed should do its batch arithmetic, and the configuration that it should obey: stage 0 of ZeRO where the
        optimizer's states are ours.

    Raises:
        ConfigError: the first mistake.
    """
    one_sentence_for_mistakes()
    build_locks.warn()
    raw = as_understood(raw)
    block = config.parse(raw["axonn"])
    for key, packages in _PACKAGES.items():
        if getattr(block, key) is not None:
            names.require(f"axonn.{key}", *packages)
    if not block.others and not any(getattr(block, key) is not None for key in _SYSTEMS):
        block.require_gather(section(raw, "zero_optimization").get("stage", 0), ours=False)
        _tile(block, raw)
        _stock_engine()
        if block.pccl is None:
            _say_that_nothing_is_on()
        _communicate(block)
        return mpu, raw
    refuse(of_old_forms(raw))
    compose.check(block)
    stage = section(raw, "zero_optimization").get("stage", 0)
    own = states_config.owner(block, raw, mpu)
    if own is not None:
        names.require(f"axonn.{own}", "axonn_tp", "samo", "ted_moe")
    _tile(config.parse({}) if own else block, raw, states_config.may_be_ours(block, raw, mpu))
    _stock_pipelines()
    if block.tensor_parallel is None or block.pipeline is not None:  # whose engine puts its own in that place
        _forget_unit()
    _forget_experts()
    mpu = engines.use(block, raw, mpu)
    parsed_config.axonn, parsed_config.axonn_raw = block, raw
    parsed_config.axonn_stage, parsed_config.axonn_owner = stage, own
    _communicate(block)
    return mpu, raw if own is None else _without_states(raw)


def refuse_mesh(block: config.Axonn | None, mesh_device: Any = None, **_: Any) -> None:
    """Refuse groups that DeepSpeed makes by the ``mesh_param`` of `deepspeed.initialize`, or by its keys data_parallel_size and sequence_parallel_size.

    Args:
        block: with a key of a system; None: there is none.
        mesh_device: of these groups.

    Raises:
        ConfigError: the block's are others, or know nothing of ranks that share sequences.
    """
    given = [key for key in _SYSTEMS if getattr(block, key, None) is not None]
    if mesh_device is None or not given:
        return
    data, sequence = mesh_device.mesh.shape
    own = next((key for key in ("tensor_parallel", "ted") if key in given), None)
    if own is None and sequence == 1:
        return
    said = f"deepspeed.initialize was given mesh_param (or data_parallel_size and sequence_parallel_size) = ({data}, {sequence})"
    if own is not None:
        raise config.ConfigError(f"{said}, and axonn.{own} makes groups of its own; leave it out")
    raise config.ConfigError(
        f"{said}, where {sequence} ranks share sequences, of whose sums axonn.{given[0]} does not know; use axonn.tensor_parallel.gz.sequence"
    )


def _without_states(raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration that DeepSpeed is to obey where the optimizer's states are ours."""
    # DeepSpeed refuses the last two at stage 0, or without its own accumulation there.
    ours = ("offload_optimizer", "compute_grad_norm", "overlap_comm")
    zero = {key: value for key, value in section(raw, "zero_optimization").items() if key not in ours}
    types = {key: value for key, value in section(raw, "data_types").items() if key != "grad_accum_dtype"}
    return {**raw, "zero_optimization": {**zero, "stage": 0}, "data_types": types}


def step_aside() -> None:
    """Let DeepSpeed be itself: the configuration now parsed has no block."""
    _stock_engine()
    _tile(config.parse({}), {})
    _communicate(config.parse({}))


def _tile(block: config.Axonn, raw: Mapping[str, Any], by_model: bool = False) -> None:
    if block.ted is not None or "axonn_plugins.hosts.deepspeed.optim.tiled_zero" in sys.modules:
        from axonn_plugins.hosts.deepspeed.optim import tiled_zero as tiled

        tiled.use(block, raw, by_model)


def _communicate(block: config.Axonn) -> None:
    if block.pccl is not None:
        from axonn_plugins.hosts.deepspeed import communication

        communication.use(block.pccl)
    elif "axonn_plugins.hosts.deepspeed.communication" in sys.modules:
        sys.modules["axonn_plugins.hosts.deepspeed.communication"].step_aside()


def _stock_engine() -> None:
    deepspeed.DeepSpeedEngine = DeepSpeedEngine
    _stock_pipelines()
    _forget_unit()
    _forget_experts()


def _stock_pipelines() -> None:
    deepspeed.PipelineEngine = PipelineEngine
    if _DUAL_PIPE is not None:
        deepspeed.DualPipeVEngine = _DUAL_PIPE


def _forget_unit() -> None:
    """DeepSpeed keeps the model parallel unit from one engine to the next: not ours."""
    if getattr(groups.mpu, "axonn", False):
        groups.mpu = None


def _say_that_nothing_is_on() -> None:
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if rank == 0:
        keys = ", ".join(key for key in config.Axonn.model_fields if key != "requires")
        print(f"axonn: the block turns nothing on, for it has none of {keys}", file=sys.stderr, flush=True)


def _forget_experts() -> None:
    """DeepSpeed would take the groups of our experts for its own of the same ep_size."""
    if "axonn_plugins.hosts.deepspeed.ted.tables" in sys.modules:
        sys.modules["axonn_plugins.hosts.deepspeed.ted.tables"].step_aside()


def one_sentence_for_mistakes() -> None:
    """An uncaught ConfigError ends the script with its sentence instead of a traceback."""
    previous = sys.excepthook
    if getattr(previous, "axonn", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, config.ConfigError):
            print(f"axonn: error: {error}", file=sys.stderr, flush=True)
            _let_others_say_so()
        else:
            previous(kind, error, trace)

    hook.axonn = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _let_others_say_so() -> None:
    """Rank 0 may keep the store of ranks on their way to the same mistake; were it gone, they would tell of a lost connection."""
    if not dist.is_initialized():
        return
    deadline = time.monotonic() + _OTHERS_SECONDS
    with suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        said = store.add(_MISTAKES, 1)
        while dist.get_rank() == 0 and said < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.01)
            said = store.add(_MISTAKES, 0)
