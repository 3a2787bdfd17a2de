"""Settings of training that are beyond 004."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from axonn_plugins.planner.schedules import Schedule

OVERLAPS = frozenset({"OAR", "ORS", "OAG"})
"""Overlap of all-reduces with the product of the weight's gradient, of reduce-scatters with the rest of backward, and of all-gathers with the
layer before (000, section 5.1.4)."""


@dataclass(frozen=True)
class Setting:
    """Settings of a model's training that are beyond the paper.

    Attributes:
        recompute: activation checkpointing: layers keep their inputs alone, and backward runs forward again.
        interleave: parts of the model on each stage (interleaved 1F1B): bubbles are so many times shorter, messages as many times more,
            and activations of (np − 1)/(np · interleave) more microbatches are in flight.
        sparsity: share of the parameters that is pruned, with SAMO's compressed state and gradients: 2 + (4 + 12/nd)·(1 − p)
            bytes a parameter, as `samo` keeps them.
        experts: in the place of every second layer's MLP (`experts`); 0 for none.
        whole: also what 004 leaves out (`rest`): output layer and loss, the optimizer's step, residual sums.
        fused: attention is one kernel; else four, whose scores backward computes again.
        overlap: what of 4D grids' collectives hides behind compute, of `OVERLAPS`.
        keep_gathered: share of the weights that 4D grids gather in forward and keep for backward (with recomputation: 003, section IV-D).
        cache_gathers: of 4D grids with recomputation, the first layers that keep theirs, as the block says it; 0: as `keep_gathered` says.
        in_flight: microbatches whose activations the stages of 4D grids keep at most; None for as many as stages.
        sharing: the way between ranks of 4D grids that share sequences (`context.WAYS`); "auto" is what sends least, None what is fastest.
        dropping: experts' all-to-alls carry no duplicates (000, section 7.3.1).
        stashing: with recomputation, what forward's collectives gave is kept, and none runs again (000, section 7.3.2).
        offload: float32 weights and optimizer state are in host memory, and visit the GPU in buckets (000, section 3.3).
        fp8: products are in 8 bits, in the calibrated mode.
        float32: all numbers have 4 bytes, and no weights beside them; products are as fast as the machine's file says.
        schedule: of the pipeline (`schedules`).
    """

    recompute: bool = False
    interleave: int = 1
    sparsity: float = 0.0
    experts: int = 0
    whole: bool = False
    fused: bool = True
    overlap: frozenset[str] = OVERLAPS
    keep_gathered: float = 0.0
    cache_gathers: int | str = 0
    in_flight: float | None = None
    sharing: Literal["gather", "ring", "heads", "auto"] | None = None
    dropping: bool = True
    stashing: bool = False
    offload: bool = False
    fp8: bool = False
    float32: bool = False
    schedule: Schedule = "1f1b"

    @property
    def kept(self) -> float:
        """Share of the parameters that is not pruned."""
        return 1 - self.sparsity

    @property
    def element(self) -> int:
        """Bytes of a number in weights, gradients and activations."""
        return 4 if self.float32 else 2

    @property
    def states(self) -> int:
        """Bytes of a parameter in Adam's states on the GPU, and in float32 weights beside 16-bit ones."""
        return 0 if self.offload else 8 if self.float32 else 12
