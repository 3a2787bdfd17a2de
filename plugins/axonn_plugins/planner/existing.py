"""A configuration that exists, as the planner's sizes: DeepSpeed's file, with our block or without."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from axonn_plugins import config
from axonn_plugins.config import batch, compose, training
from axonn_plugins.config.base import ConfigError
from axonn_plugins.planner import files
from axonn_plugins.planner.setting import Setting

_OTHER_SPLITS = {
    "sequence_parallel_size": "splits sequences by all-to-alls, which is not modelled; use axonn.tensor_parallel.gz.sequence in its place",
    "expert_parallel": "deals out experts in a way that is not modelled; use axonn.ted",
}
_AUTO = "auto"
_OBJECTS = {"zero_optimization": '{"stage": 1}', **dict.fromkeys(("bf16", "bfloat16", "fp16"), '{"enabled": true}')}
"""Words to write for keys that DeepSpeed wants an object of."""
_SLOWER = "neither bf16 nor fp16 is enabled: memory and bandwidths count as of float32, but products as fast as the machine's file says, on GPUs as in 16 bits"


@dataclass(frozen=True)
class Existing:
    """The settings that a configuration makes.

    Attributes:
        fixed: sizes of the grid and its micro-batches, as far as it says them.
        batch: samples of a step.
        stage: of ZeRO, whose shares of weights are z already.
        setting: how it trains.
        grid: whether it has a grid of ours.
        attention: the way between ranks that share sequences.
        in_flight: see `Setting.in_flight`.
        notes: what the model does not see, or was not said.
    """

    fixed: Mapping[str, int]
    batch: int
    stage: int
    setting: Setting
    grid: bool
    attention: Literal["gather", "ring", "heads", "auto"] = "auto"
    in_flight: float | None = None
    notes: tuple[str, ...] = ()


def read(name: str, gpus: int, samples: int | None, stages: int | None, setting: Setting) -> Existing:
    """Read ds_config.json.

    Args:
        name: its path.
        gpus: that it runs on.
        samples: of a step, where the command line says it.
        stages: of the pipeline, likewise.
        setting: how it trains besides.

    Raises:
        ConfigError: it cannot be read, or would be refused on so many GPUs.
    """
    raw = files.read("--check", Path(name))
    given = config.parse({} if raw.get("axonn") is None else raw["axonn"])
    compose.check(given)
    for mistake in training.mistakes(raw):
        raise ConfigError(mistake)
    zero = _zero(raw)
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise ConfigError(f"zero_optimization.stage = {stage!r} is not known; use 0, 1, 2 or 3")
    _refuse_others(raw)
    if given.pipeline is not None and stages is None:
        raise ConfigError(
            "axonn.pipeline leaves the number of stages to the PipelineModule; say it besides, such as --fix stages=4"
        )
    sizes = _grid(raw, given, gpus, stages or 1, stage)
    total, steps, notes = _batch(raw, sizes, samples)
    if float32 := _float32(raw):
        notes.append(_SLOWER)
    notes += _notes(given)
    if _offloaded(zero, "param"):
        notes.append("zero_optimization.offload_param is not modelled: weights are counted on the GPU")
    setting = replace(
        setting, float32=float32, offload=given.offload_optimizer is not None or _offloaded(zero, "optimizer")
    )
    fixed = sizes if steps is None else {**sizes, "m": steps}
    grid = given.tensor_parallel
    way = "auto" if grid is None else grid.attention
    setting, limit = _setting(given, setting), _limit(given, stages or 1)
    return Existing(fixed, total, stage, setting, grid is not None, way, limit, tuple(notes))


def _notes(given: config.Axonn) -> list[str]:
    """Sentences on settings of the block that the model does not see as they are."""
    grid, found = given.tensor_parallel, []
    if grid is not None:
        if isinstance(grid.cache_gathers, int) and grid.cache_gathers:
            found.append(
                f"axonn.tensor_parallel.cache_gathers = {grid.cache_gathers} counts a block's matrices, of gated models with queries, keys, values and "
                "the gate apart"
            )
        if grid.layout == "replicated":
            found.append("axonn.tensor_parallel.layout = replicated is not modelled: activations count as scattered")
        if grid.regather_inputs:
            found.append("axonn.tensor_parallel.regather_inputs is not modelled: inputs are counted as kept")
    if given.ted is not None and isinstance(given.ted.expert, int):
        found.append(
            f"axonn.ted.expert = {given.ted.expert} is not read: experts are dealt out to as many data-parallel ranks as divide them"
        )
    if given.samo is not None and given.samo.sparsity is None:
        found.append(
            "axonn.samo does not say its sparsity, so that weights count as --samo says, by default as not pruned"
        )
    return found


def _limit(given: config.Axonn, stages: int) -> float | None:
    """Microbatches that a stage keeps at most, where these are not as many as stages (`Setting.in_flight`)."""
    pipeline = given.pipeline
    if pipeline is None:
        return None
    of = {"message_driven": 2.0 * stages, "1f1b": float(stages), "gpipe": math.inf}
    limit = of[pipeline.schedule] if pipeline.pipeline_limit == "auto" else float(pipeline.pipeline_limit)
    return min(limit, stages) if pipeline.schedule == "1f1b" else limit


def _section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = raw.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ConfigError(f'{key} = {found!r} is not an object; write one, such as "{key}": {_OBJECTS.get(key, "{}")}')
    return found


def _zero(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """ZeRO's section; true, which DeepSpeed still takes, is stage 1."""
    given = raw.get("zero_optimization")
    return {"stage": int(given)} if isinstance(given, bool) else _section(raw, "zero_optimization")


def _offloaded(zero: Mapping[str, Any], what: Literal["param", "optimizer"]) -> bool:
    """True if parameters or optimizer states are in host memory or on a disk, by today's key or by the one before."""
    before = {"optimizer": "cpu_offload", "param": "cpu_offload_param"}[what]
    return _section(zero, f"offload_{what}").get("device", "none") != "none" or zero.get(before) is True


def _float32(raw: Mapping[str, Any]) -> bool:
    """True if no 16-bit type is turned on."""
    of_bf16 = "bf16" if raw.get("bf16") is not None else "bfloat16"
    on = [half for half in (of_bf16, "fp16") if _section(raw, half).get("enabled") in (True, _AUTO)]
    if len([half for half in on if _section(raw, half)["enabled"] is True]) == 2:
        raise ConfigError(f"{on[0]} and fp16 are both enabled, which DeepSpeed refuses; leave one of them out")
    return not on


def _refuse_others(raw: Mapping[str, Any]) -> None:
    for key, why in _OTHER_SPLITS.items():
        given = raw.get(key)
        if given not in (None, 1) and not (isinstance(given, Mapping) and not given.get("enabled", True)):
            raise ConfigError(f"{key} {why}")


def _grid(raw: Mapping[str, Any], given: config.Axonn, gpus: int, stages: int, stage: int) -> dict[str, int]:
    """Sizes that are given: the block's, or what DeepSpeed's own keys are in its terms."""
    staged = {"stages": stages}  # also where sizes are open: a configuration makes no stages
    if given.tensor_parallel is None:
        split = 1 if given.ted is None else given.ted.tensor
        x = _section(raw, "tensor_parallel").get("autotp_size") or split
        z = (_zero(raw).get("zero_hpz_partition_size", 1) if stage == 3 else 1) or 1
        x, z = (
            files.whole(key, size) for key, size in (("tensor_parallel.autotp_size", x), ("zero_hpz_partition_size", z))
        )
        z = gpus // (x * stages) if stage == 3 and z == 1 else z
        found = {"gx": x, "gy": 1, "gz": max(z, 1)}
    else:
        if stage == 3:
            raise ConfigError(
                "zero_optimization.stage = 3 does not go with axonn.tensor_parallel, whose z axis splits the weights in the same way; use "
                "stage 0, 1 or 2 and make gz larger"
            )
        found = given.tensor_parallel.given
    product = stages
    for size in found.values():
        product *= size
    if gpus % product:
        what = "*".join([*found, *(staged if stages > 1 else {})])
        raise ConfigError(f"--gpus = {gpus} is not a multiple of {what} = {product}; change one of them")
    whole = len(found) == 3
    sequence = 1 if given.tensor_parallel is None else given.tensor_parallel.sequence
    shared = {"sequence": sequence} if sequence > 1 else {}
    return {**found, **({"gdata": gpus // product} if whole else {}), **shared, **staged}


def _batch(raw: Mapping[str, Any], sizes: Mapping[str, int], samples: int | None) -> tuple[int, int | None, list[str]]:
    """Samples of a step, micro-batches where they are known, and what is said of keys that are "auto"."""
    left = [key for key in batch.KEYS if raw.get(key) == _AUTO]
    known = {key: None if key in left else raw.get(key) for key in batch.KEYS}
    total, micro, steps = known.values()
    if None not in (samples, total) and samples != total:
        raise ConfigError(f"--batch = {samples} is not train_batch_size = {total!r}; leave one of them out")
    total = samples if total is None else total
    if total is None and (micro is None or "gdata" not in sizes):
        raise ConfigError("the configuration does not say how many samples a step has; give --batch")
    notes = [f'{key} is "auto": the best value is taken' for key in left[0 if samples is None else 1 :]]
    gz, gdata, sequence = (sizes.get(axis, 1) for axis in ("gz", "gdata", "sequence"))
    batch.check({**known, batch.KEYS[0]: total}, gz, gdata, sequence)
    readers = gz // sequence * gdata
    total = total or (micro or 1) * (steps or 1) * readers
    if micro and "gdata" in sizes:
        return total, total // (readers * micro), []
    return total, steps or (None if left or "gdata" not in sizes else 1), notes


def _setting(given: config.Axonn, setting: Setting) -> Setting:
    if given.samo is not None and given.samo.sparsity is not None:
        setting = replace(setting, sparsity=given.samo.sparsity)
    if given.pipeline is not None and given.pipeline.activation_checkpointing:
        setting = replace(setting, recompute=True)
    grid = given.tensor_parallel
    if grid is None:
        return setting
    on = {"OAR": grid.overlap_all_reduce, "ORS": grid.overlap_reduce_scatter, "OAG": grid.overlap_all_gather}
    # A recomputed forward finds none of what the first one gathered, unless it is cached.
    kept = 0.0 if setting.recompute else 1.0 - grid.reshard_after_forward
    setting = replace(setting, keep_gathered=kept, cache_gathers=grid.cache_gathers if setting.recompute else 0)
    return replace(setting, overlap=frozenset(name for name, is_on in on.items() if is_on))
