"""What happens when DeepSpeed parses a configuration that holds the ``"axonn"`` block.

The block is checked against itself, against the rest of the configuration and against the number of ranks, before
any group is made; DeepSpeed's batch arithmetic is given the gz·gdata ranks that read different data; and
`deepspeed.initialize` is led to `AxonnEngine` or `SamoEngine`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from axonn_tp import Grid
from plugins import config

# Not in older versions of DeepSpeed.
_DUAL_PIPE = getattr(deepspeed, "DualPipeVEngine", None)
# Words in the names of optimizers that look at a whole weight matrix or layer at once.
NOT_ELEMENTWISE = (
    *("lamb", "lars", "larc", "muon", "muadam", "musgd", "shampoo", "soap", "adafactor", "novograd", "prodigy"),
    *("dadapt", "onebit", "zerooneadam"),
)


def needs_whole_matrices(name: str) -> bool:
    """Whether an optimizer of this name would compute something else on shards."""
    return any(word in name.lower().replace("_", "") for word in NOT_ELEMENTWISE)


class BatchRanks:
    """Stands in for an mpu while the configuration is parsed: only the number of ranks that read different data."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def get_data_parallel_world_size(self) -> int:
        """Number of ranks that read different data."""
        return self.grid.batch


def configure(parsed_config: Any, raw: dict[str, Any], mpu: Any) -> Any:
    """Check the block of `raw` and get ready for the engine that obeys it.

    Args:
        parsed_config: the DeepSpeedConfig under construction; gets the attribute ``axonn``.
        raw: the whole configuration.
        mpu: the user's model parallel unit.

    Returns:
        The mpu with which DeepSpeed should do its batch arithmetic.

    Raises:
        ConfigError: the first mistake.
    """
    _one_sentence_for_mistakes()
    block = config.parse(raw["axonn"])
    if block.ted is not None and block.samo is not None:
        raise config.ConfigError("axonn.ted does not go with axonn.samo yet; leave one of them out")
    _tile(block, raw)
    _stock_pipelines()
    if block.offload_optimizer is not None:
        from plugins.deepspeed import offload_config

        offload_config.check(block, raw, mpu)
    if block.pipeline is not None:
        from plugins.deepspeed import pipeline_config

        mpu = pipeline_config.use(block, raw, mpu)
        _communicate(block)
        parsed_config.axonn = block
        return mpu
    if block.offload_optimizer is not None:
        _communicate(block)
        parsed_config.axonn = block
        deepspeed.DeepSpeedEngine = offload_config.engine()
        return mpu
    if block.samo is not None:
        from plugins.deepspeed import samo_config

        samo_config.check(raw, mpu)
        _communicate(block)
        parsed_config.axonn = block
        deepspeed.DeepSpeedEngine = samo_config.engine()
        return mpu
    if block.ted is not None and block.tensor_parallel is None:
        if isinstance(mpu, PipelineParallelGrid):
            _refuse_pipeline("axonn.ted")
        from plugins.deepspeed import ted_config

        mpu = ted_config.check(block.ted, raw, mpu)
        _communicate(block)
        parsed_config.axonn, parsed_config.axonn_raw = block, raw
        deepspeed.DeepSpeedEngine = ted_config.engine()
        return mpu
    if block.tensor_parallel is None:
        _stock_engine()
        _communicate(block)
        return mpu
    automatic = len(block.tensor_parallel.given) < 3
    grid = stand_in(raw) if automatic else grid_for(block.tensor_parallel, world_size())
    if isinstance(mpu, PipelineParallelGrid):
        _refuse_pipeline("axonn.tensor_parallel")
    if mpu is not None:
        raise config.ConfigError(
            "axonn.tensor_parallel makes its own groups, and deepspeed.initialize was given an mpu; leave one of them out"
        )
    check(raw, grid)
    if automatic:
        _check_automatic(block.tensor_parallel, raw)
    _communicate(block)
    parsed_config.axonn, parsed_config.axonn_raw = block, raw
    from plugins.deepspeed.engine import AxonnEngine

    deepspeed.DeepSpeedEngine = AxonnEngine
    return BatchRanks(grid)


def step_aside() -> None:
    """Let DeepSpeed be itself: the configuration now parsed has no block."""
    _stock_engine()
    _tile(config.parse({}), {})
    _communicate(config.parse({}))


def _tile(block: config.Axonn, raw: Mapping[str, Any]) -> None:
    if block.ted is not None or "plugins.deepspeed.tiled" in sys.modules:
        from plugins.deepspeed import tiled

        tiled.use(block, raw)


def _communicate(block: config.Axonn) -> None:
    if block.pccl is not None:
        from plugins.deepspeed import communication

        communication.use(block.pccl)
    elif "plugins.deepspeed.communication" in sys.modules:
        sys.modules["plugins.deepspeed.communication"].step_aside()


def _stock_engine() -> None:
    deepspeed.DeepSpeedEngine = DeepSpeedEngine
    _stock_pipelines()
    forget_unit()


def _stock_pipelines() -> None:
    deepspeed.PipelineEngine = PipelineEngine
    if _DUAL_PIPE is not None:
        deepspeed.DualPipeVEngine = _DUAL_PIPE


def forget_unit() -> None:
    """DeepSpeed keeps the model parallel unit from one engine to the next: not ours."""
    from deepspeed.utils import groups

    if getattr(groups.mpu, "axonn", False):
        groups.mpu = None


def world_size() -> int:
    """Ranks of this run, known before any group exists."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def grid_for(block: config.TensorParallel, world: int) -> Grid:
    """The grid that the block asks for.

    Raises:
        ConfigError: its sizes do not divide the ranks.
    """
    try:
        return Grid.for_world(world, **block.given)
    except ValueError as error:
        raise config.ConfigError(f"axonn.tensor_parallel: {error}") from None


def _check_automatic(block: config.TensorParallel, raw: Mapping[str, Any]) -> None:
    if raw.get("train_batch_size") is None:
        raise config.ConfigError(
            'axonn.tensor_parallel has sizes that are "auto", which leave open how many ranks read different data; give train_batch_size, '
            "so that what is learned does not depend on the choice"
        )
    if block.machine is not None:
        from plugins.planner import machine

        machine.load(block.machine, "axonn.tensor_parallel.machine")


def stand_in(raw: Mapping[str, Any]) -> Grid:
    """While sizes are "auto": a grid on which DeepSpeed's batch arithmetic comes out; the engine parses again with the one chosen."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    numbers = [number for key in keys if isinstance(number := raw.get(key), int) and number > 0]
    if len(numbers) < len(keys):
        return Grid()
    total, micro, steps = numbers
    return Grid(gdata=max(total // (micro * steps), 1))


def check(raw: Mapping[str, Any], grid: Grid) -> None:
    """Refuse DeepSpeed settings that the block cannot go with, with the reason.

    Raises:
        ConfigError: the first.
    """
    zero = section(raw, "zero_optimization")
    stage = zero.get("stage", 0)
    refusals = [
        (
            stage == 3,
            "zero_optimization.stage = 3 does not go with axonn.tensor_parallel, whose z axis splits the weights in the same way; "
            "use stage 0, 1 or 2 and make gz larger",
        ),
        (enabled(raw, "fp16") and enabled(raw, "bf16"), "fp16.enabled and bf16.enabled are both true; turn one off"),
        *[
            (
                enabled(raw, half) and not supported(),
                f"{half}.enabled = true, but DeepSpeed finds no {half} on this device ({get_accelerator().device_name()}); use another precision",
            )
            for half, supported in (
                ("fp16", get_accelerator().is_fp16_supported),
                ("bf16", get_accelerator().is_bf16_supported),
            )
        ],
        (
            on(zero, "offload_optimizer"),
            "zero_optimization.offload_optimizer is not supported with axonn.tensor_parallel; remove it",
        ),
        (
            on(zero, "offload_param"),
            "zero_optimization.offload_param belongs to ZeRO-3, which axonn.tensor_parallel replaces; remove it",
        ),
        (bool(zero.get("zenflow")), "zero_optimization.zenflow is not supported with axonn.tensor_parallel; remove it"),
        (
            bool(zero.get("zero_quantized_gradients")) or bool(zero.get("zero_quantized_weights")),
            "zero_optimization.zero_quantized_* would change results under axonn.tensor_parallel; remove it",
        ),
        (
            zero.get("reduce_scatter") is False and stage in (1, 2) and grid.gz > 1,
            "zero_optimization.reduce_scatter = false cannot keep weights split over z apart; remove it",
        ),
        (
            zero.get("contiguous_gradients") is False and stage in (1, 2) and grid.gz > 1,
            "zero_optimization.contiguous_gradients = false cannot keep weights split over z apart; remove it",
        ),
        (
            section(raw, "tensor_parallel").get("autotp_size", 0) > 1,
            "tensor_parallel.autotp_size is DeepSpeed's own tensor parallelism; remove it, or the axonn block",
        ),
        (
            enabled(raw, "expert_parallel"),
            "expert_parallel does not go with axonn.tensor_parallel yet; remove one of them",
        ),
        (
            raw.get("sequence_parallel_size", 1) != 1,
            "sequence_parallel_size does not go with axonn.tensor_parallel, which splits tokens over z; remove it",
        ),
        (enabled(raw, "hybrid_engine"), "hybrid_engine has an engine of its own; remove it, or the axonn block"),
        (
            section(raw, "checkpoint").get("load_universal", False) is True,
            "checkpoint.load_universal cannot be read into weights split over x, y and z; remove it",
        ),
        (
            section(raw, "compile").get("deepcompile", False) is True,
            "compile.deepcompile does not go with axonn.tensor_parallel; remove it",
        ),
        *[
            (
                bool(given),
                f"{key} writes checkpoints in the background, where they could not be renamed when complete; remove it",
            )
            for key, given in (
                ("nebula", raw.get("nebula")),
                ("datastates_ckpt", raw.get("datastates_ckpt")),
                ("checkpoint.writer", section(raw, "checkpoint").get("writer")),
            )
        ],
        (
            enabled(raw, "elasticity"),
            "elasticity changes the number of ranks, which axonn.tensor_parallel fixes; remove it",
        ),
        (
            enabled(raw, "torch_autocast")
            and section(raw, "torch_autocast").get("dtype") in ("float16", "fp16", "half"),
            "torch_autocast.dtype = float16 scales the loss on each rank by itself; use bfloat16, or the fp16 section",
        ),
        (
            enabled(raw, "bf16") and section(raw, "data_types").get("grad_accum_dtype") in ("fp32", "float32"),
            "data_types.grad_accum_dtype = fp32 with bf16 is not supported with axonn.tensor_parallel; remove it",
        ),
        (
            needs_whole_matrices(str(section(raw, "optimizer").get("type", ""))),
            f"optimizer.type = {section(raw, 'optimizer').get('type')} needs whole weight matrices, which axonn.tensor_parallel splits; "
            "use an element-wise one such as AdamW",
        ),
    ]
    for refused, reason in refusals:
        if refused:
            raise config.ConfigError(reason)
    check_batch(raw, grid)


def section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A section of the configuration; empty where there is none."""
    found = raw.get(key)
    return found if isinstance(found, Mapping) else {}


def enabled(raw: Mapping[str, Any], key: str) -> bool:
    """Whether a section says that it is on."""
    return section(raw, key).get("enabled", False) is True


def on(zero: Mapping[str, Any], key: str) -> bool:
    """Whether state is kept elsewhere than on the device."""
    return section(zero, key).get("device", "none") != "none"


def check_batch(raw: Mapping[str, Any], grid: Grid) -> None:
    """DeepSpeed's batch arithmetic over the ranks that read different data, as sentences instead of assertions."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (raw.get(key) for key in keys)
    for key, value in zip(keys, (total, micro, steps), strict=True):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise config.ConfigError(f"{key} = {value!r} is not an integer of at least 1; correct its value")
    if total is None and micro is None:
        raise config.ConfigError(
            "train_batch_size and train_micro_batch_size_per_gpu are both missing; give one of them"
        )
    if total is None:
        return
    ranks = f"gz*gdata = {grid.gz}*{grid.gdata} = {grid.batch} ranks that read different data"
    given = (micro or 1) * (steps or 1)
    if micro and steps and total != given * grid.batch:
        raise config.ConfigError(
            f"train_batch_size = {total} is not {micro} (train_micro_batch_size_per_gpu) * {steps} (gradient_accumulation_steps) * {ranks}; "
            "leave one of the three out"
        )
    if total % (given * grid.batch):
        wanted = f"{given} * " if given > 1 else ""
        raise config.ConfigError(
            f"train_batch_size = {total} does not divide by {wanted}{ranks}; use a multiple of {given * grid.batch}"
        )


def _refuse_pipeline(key: str) -> None:
    raise config.ConfigError(
        f"{key} does not go with a PipelineModule yet; leave the block out, or pass a plain torch.nn.Module"
    )


def _one_sentence_for_mistakes() -> None:
    """An uncaught ConfigError ends the script with its sentence instead of a traceback."""
    previous = sys.excepthook
    if getattr(previous, "axonn", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, config.ConfigError):
            print(f"axonn: error: {error}", file=sys.stderr, flush=True)
        else:
            previous(kind, error, trace)

    hook.axonn = True  # type: ignore[attr-defined]
    sys.excepthook = hook
