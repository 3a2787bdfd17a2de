"""ZeRO-1 and 2 whose step upcasts gradients a tile at a time (000, section 7.2): axonn.ted.tile_size.

DeepSpeed's own `step` runs: it looks for overflow, computes the norm and gathers the weights. Where it would flatten and
upcast the gradients of a whole partition it is given a stand-in, and the update of the partition is done in tiles. The
optimizer's state stays keyed on the flat float32 partition, as checkpoints need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from deepspeed.runtime import engine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import get_norm_dtype
from torch import Tensor

from axonn_plugins.config import Axonn, ConfigError
from axonn_plugins.hosts.deepspeed.sections import needs_whole_matrices
from axonn_plugins.optim.lending import Loan, TiledStep, parts_of
from axonn_tp.comm.optimizer_trial import StepMemory, examine, require_one_by_one


class TiledZeroOptimizer(DeepSpeedZeroOptimizer):
    """DeepSpeed's ZeRO-1/2 optimizer with the same bits, and at most 4·tile_size bytes of temporary memory in the update.

    Norms, too, which DeepSpeed computes in float64 from a copy of each gradient, are computed part by part.
    """

    tile_size: int

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._memory: dict[int, StepMemory] = {}
        self._gradients: list[Tensor] = []
        self._stand_in: Tensor | None = None
        self._norm: Any = None
        try:
            for group, weights in enumerate(self.single_partition_of_fp32_groups):
                state, options = self.optimizer.state.get(weights, {}), self.optimizer.param_groups[group]
                require_one_by_one(self.optimizer, options)
                self._memory[group] = examine(self.optimizer, options, weights, state)
        except ValueError as error:
            raise ConfigError(f"axonn.ted.tile_size = {self.tile_size}: {error}") from None

    def get_grad_norm_direct(self, gradients: Iterable[Tensor], params: Iterable[Tensor], norm_type: int = 2) -> Tensor:
        """DeepSpeed's, of gradients cut into parts that it may upcast."""
        real = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
        pairs = [(part, p) for gradient, p in zip(real, params, strict=False) for part in self._parts(gradient)]
        return super().get_grad_norm_direct([part for part, _ in pairs], [p for _, p in pairs], norm_type)

    def _parts(self, gradient: Tensor) -> Iterable[Tensor]:
        size = max(1, 4 * self.tile_size // get_norm_dtype().itemsize)
        return [gradient] if gradient.numel() <= size else gradient.reshape(-1).split(size)

    def _get_preflattened_grad_partition(self, group_idx: int) -> Tensor:
        """Keep the gradients of the group, and let DeepSpeed have a stand-in of their shape and of no size."""
        flat = super()._get_preflattened_grad_partition(group_idx)
        self._gradients = list(self.averaged_gradients[group_idx]) if flat is None else [flat]
        weights = self.single_partition_of_fp32_groups[group_idx]
        self._stand_in = torch.zeros((), dtype=weights.dtype, device=weights.device).expand(weights.shape)
        return self._stand_in

    def unscale_and_clip_grads(self, grad_groups_flat: list[Tensor], total_norm: Any) -> None:
        """DeepSpeed's; of the stand-in only the norm is kept, for the tiles."""
        if grad_groups_flat[0] is self._stand_in:
            self._norm = total_norm
        else:
            super().unscale_and_clip_grads(grad_groups_flat, total_norm)

    def _optimizer_step(self, group_no: int) -> None:
        weights = self.single_partition_of_fp32_groups[group_no]
        gradients, self._gradients, self._stand_in = self._gradients, [], None
        weights.grad = None
        first = not self.optimizer.state.get(weights)
        size = min(self._memory[group_no].elements(self.tile_size, first), weights.numel())
        step, reader = TiledStep(self.optimizer), _Reader(gradients, weights, size)
        for part in parts_of(group_no, weights, size):
            gradient = reader.read(part.end - part.begin)
            super().unscale_and_clip_grads([gradient], self._norm)
            step.tile([Loan(part, weights if part.whole else part.of(weights), gradient)])
        step.finish()
        self._lazy_init_hp_params_optimizer_state()


class _Reader:
    """Reads gradients one after another, as they would stand in the flat partition, zeros behind them.

    Args:
        gradients: of any shapes.
        weights: of which type and device the gradients are wanted.
        size: the most elements read at a time.
    """

    def __init__(self, gradients: list[Tensor], weights: Tensor, size: int) -> None:
        self._gradients, self._done, self._place = [g.detach().reshape(-1) for g in gradients], 0, 0
        own = len(gradients) == 1 and gradients[0].dtype == weights.dtype and gradients[0].numel() == weights.numel()
        self._buffer = None if own else torch.empty(size, dtype=weights.dtype, device=weights.device)

    def read(self, count: int) -> Tensor:
        """The next elements: the gradients' own memory where it will do, else the buffer."""
        if self._buffer is None:
            self._done += count
            return self._gradients[0][self._done - count : self._done]
        filled = 0
        for part in self._next(count):
            self._buffer[filled : filled + part.numel()].copy_(part)
            filled += part.numel()
        self._buffer[filled:count].zero_()
        return self._buffer[:count]

    def _next(self, count: int) -> Iterator[Tensor]:
        while count and self._place < len(self._gradients):
            gradient = self._gradients[self._place]
            part = gradient[self._done : self._done + count]
            count -= part.numel()
            self._done += part.numel()
            if self._done == gradient.numel():
                self._place, self._done = self._place + 1, 0
            yield part


def use(block: Axonn, raw: Mapping[str, Any], by_model: bool = False) -> None:
    """Have the engine that is made next step in tiles, if the block says so.

    Args:
        block: the block.
        raw: the whole configuration.
        by_model: whether the model is to say if the states are DeepSpeed's (`require`).

    Raises:
        ConfigError: tiles cannot go with something else in the configuration.
    """
    step_aside()
    if block.ted is None or block.ted.tile_size is None:
        return
    try:
        check(raw, block)
    except ConfigError:
        if "tile_size" in block.ted.model_fields_set and not by_model:
            raise
        return
    engine.DeepSpeedZeroOptimizer = type(
        "TiledZeroOptimizer", (TiledZeroOptimizer,), {"tile_size": block.ted.tile_size}
    )


def require(block: Axonn, raw: Mapping[str, Any]) -> None:
    """Refuse a size that is given, where states are DeepSpeed's and tiles cannot go with something else.

    Raises:
        ConfigError: they cannot.
    """
    if block.ted is not None and block.ted.tile_size is not None and "tile_size" in block.ted.model_fields_set:
        check(raw, block)


def step_aside() -> None:
    """Let DeepSpeed step by itself."""
    engine.DeepSpeedZeroOptimizer = DeepSpeedZeroOptimizer


def check(raw: Mapping[str, Any], block: Axonn) -> None:
    """Refuse what tiles do not go with, with the reason.

    Raises:
        ConfigError: the first.
    """
    assert block.ted is not None
    zero = _section(raw, "zero_optimization")
    stage = zero.get("stage", 0)
    optimizer = str(_section(raw, "optimizer").get("type", ""))
    autocast = _section(raw, "torch_autocast")
    halved = _section(raw, "bf16") or _section(raw, "bfloat16")
    sums = _section(raw, "data_types").get("grad_accum_dtype")
    refusals = [
        (
            stage == 0,
            "does not go with zero_optimization.stage = 0, whose optimizers are not tiled; use stage 1 or 2, or remove the key",
        ),
        (
            stage == 3,
            "does not go with zero_optimization.stage = 3, which is tiled already: use stage 1 or 2, or remove the key and set "
            "zero_optimization.sub_group_size",
        ),
        (
            stage == 1 and halved.get("enabled", False) is True and sums in ("fp32", "float32"),
            "does not go with bf16 and data_types.grad_accum_dtype = fp32 at zero_optimization.stage = 1, whose optimizer is not "
            "tiled; leave grad_accum_dtype out",
        ),
        (
            _section(zero, "offload_optimizer").get("device", "none") != "none",
            "does not go with zero_optimization.offload_optimizer, which keeps float32 gradients on the CPU; remove one of them",
        ),
        (bool(zero.get("zenflow")), "does not go with zero_optimization.zenflow; remove one of them"),
        (
            _section(raw, "compile").get("deepcompile", False) is True,
            "does not go with compile.deepcompile, which frees gradients before the tiles are read; remove one of them",
        ),
        (
            autocast.get("enabled", False) is True and autocast.get("dtype") in ("float16", "fp16", "half"),
            "does not go with torch_autocast.dtype = float16, which skips parts of a step; use bfloat16, or the fp16 section",
        ),
        (
            needs_whole_matrices(optimizer),
            f"does not go with optimizer.type = {optimizer}, which needs whole matrices; use an element-wise one such as AdamW",
        ),
        (
            not hasattr(DeepSpeedZeroOptimizer, "_get_preflattened_grad_partition"),
            "needs DeepSpeed 0.19.8 or newer; install it, or set tile_size to null",
        ),
    ]
    for refused, reason in refusals:
        if refused:
            raise ConfigError(f"axonn.ted.tile_size = {block.ted.tile_size} {reason}")


def _section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = raw.get(key)
    return section if isinstance(section, Mapping) else {}
