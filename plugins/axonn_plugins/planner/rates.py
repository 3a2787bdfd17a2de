"""Seconds of one operation on one GPU: the roofline of 004, or, of a calibrated machine, what training reaches."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from axonn_plugins.config.base import ConfigError
from axonn_plugins.planner.machine import Machine
from axonn_plugins.planner.setting import Setting
from axonn_plugins.planner.work import Number

Unit = Literal["tensor", "attention", "vector"]
_SUSTAINED = 0.8
"""Share of the peak that is sustained where no large product was measured: from 0.51 (MI300X) to 0.87 (A100) in stas00/ml-engineering."""
_BANDWIDTHS = ("memory_bandwidth", "host_bandwidth", "fast_bandwidth", "slow_bandwidth")
_LATEST = 0.6
"""Share of the peak of products that causal attention's forward reaches with heads of 128 and 8,192 positions: FlashAttention-2 some 190 Tflop/s on
an A100 (Dao 2023, arXiv 2307.08691), FlashAttention-3 some 600 on an H100 (Shah et al. 2024, arXiv 2407.08608)."""
_LAUNCH = 4e-6
"""Seconds between a kernel's start and the next one's, of GPUs that are kept busy."""


def spent(machine: Machine, unit: Unit, flops: Number, moved: Number, back: bool = False) -> tuple[Number, Number]:
    """Seconds of compute, and of waiting for memory besides.

    Args:
        machine: where it runs.
        unit: products, fused attention, or all else, which a calibrated machine takes to wait for memory alone.
        flops: operations.
        moved: bytes between the GPU and its memory.
        back: whether it is part of backward.
    """
    reached = machine.calibration
    if reached is None:
        peak = machine.vector if unit == "vector" else machine.tensor
        compute = machine.flop_latency + flops / (machine.flop_efficiency * peak)
        return compute, np.maximum(moved / machine.memory_bandwidth - compute, 0)
    if unit == "vector":
        return _LAUNCH, reached.passes * moved / machine.memory_bandwidth
    attention = machine.attention or reached.attention * machine.vector
    rate = reached.products * sustained(machine) if unit == "tensor" else attention
    half = machine.product_half if unit == "tensor" else None
    compute = (_LAUNCH if half is None else half / rate) + (reached.backward if back else 1.0) * flops / rate
    return compute, np.maximum(moved / machine.memory_bandwidth - compute, 0)


def vector_cost(machine: Machine) -> float:
    """Operations of products that take as long as one of fused attention's softmax; none where its rate was measured as a whole."""
    return 0.0 if machine.calibration else machine.tensor / machine.vector


def latest_attention(machine: Machine) -> Machine:
    """A machine whose attention is as fast as its latest kernels' authors measured it, or as its file says where that is more.

    Raises:
        ConfigError: of its kind there are no such kernels.
    """
    if machine.device == "cpu" or not machine.bf16:
        raise ConfigError(f'--attention = "latest" is of GPUs with bf16, which {machine.name} is not; use fused')
    return replace(machine, attention=max(machine.attention or 0.0, _LATEST * machine.tensor))


def in_precision(machine: Machine, setting: Setting) -> Machine:
    """A machine as it is for numbers of another size than 2 bytes: of 4, all bandwidths count half; a calibrated one with products in 8 bits.

    Raises:
        ConfigError: it has none.
    """
    if setting.float32:
        rates = {key: getattr(machine, key) / 2 for key in _BANDWIDTHS}
        return replace(machine, **rates, within={groups: rate / 2 for groups, rate in machine.within.items()})
    if not setting.fp8 or machine.calibration is None:
        return machine
    if machine.fp8 is None:
        raise ConfigError(f"{machine.name} has no products in 8 bits, or its file does not give fp8; leave fp8 out")
    faster = machine.calibration.fp8 * machine.fp8 / machine.tensor
    return replace(machine, sustained=faster * sustained(machine))


def sustained(machine: Machine) -> float:
    """Operations a second of a large product."""
    return machine.sustained or _SUSTAINED * machine.tensor
