"""How a parallel model goes about its work; every choice computes the same."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

LAYOUTS = ("scattered", "replicated")


@dataclass(frozen=True)
class Options:
    """Choices for `axonn_tp.parallelize`.

    Attributes:
        layout: of activations. ``"replicated"``: an all-reduced output stands on every rank of the contracted axis
            (the papers'). ``"scattered"``: the all-reduce is a reduce-scatter and an all-gather, and between the two every
            rank holds a share: features between a normal and its transposed layer, tokens in the residual stream. Same
            bytes on the wire, nothing computed or stored twice.
        overlap_all_reduce: OAR, the input gradient's reduction runs while the weight gradient is computed.
        overlap_reduce_scatter: ORS, weight gradients' reduce-scatters over z are waited for when backward ends.
        overlap_all_gather: OAG, the next layer's weight is gathered over z while this layer computes. Each of the three is on
            with NCCL and off with gloo where it is None: with gloo's collectives under way beside Python, ranks were seen to
            end by "malloc(): unaligned tcache chunk" in one of some hundred runs (torch 2.13), never without.
        reshard_after_forward: let gathered weights go after the forward pass and gather them again in backward (as FSDP
            does by default); otherwise they are kept.
        regather_inputs: keep of a scattered input only this rank's share and gather it again in backward, while the input
            gradient is computed: one all-gather more for each layer, and activations kept that are smaller by gx or gy.
        cache_gathers: under activation checkpointing, how many layers keep their gathered weight from forward to
            recomputation: a number, ``"all"``, or a size such as ``"2GiB"`` for as many as that memory holds.
        tune_matmuls: time every distinct matmul of the first step as NN, NT and TN and keep the fastest (§5.1.3).

    Raises:
        ValueError: names the option, its value and what is allowed.
    """

    layout: str = "scattered"
    overlap_all_reduce: bool | None = None
    overlap_reduce_scatter: bool | None = None
    overlap_all_gather: bool | None = None
    reshard_after_forward: bool = False
    regather_inputs: bool = False
    cache_gathers: int | str = 0
    tune_matmuls: bool = False

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f'layout = {self.layout!r} is not known; use "scattered" or "replicated"')
        self.cached()

    def on(self, device: torch.device) -> Options:
        """The same with the choices that are left open made for a device."""
        safe = device.type == "cuda"
        return replace(
            self,
            overlap_all_reduce=safe if self.overlap_all_reduce is None else self.overlap_all_reduce,
            overlap_reduce_scatter=safe if self.overlap_reduce_scatter is None else self.overlap_reduce_scatter,
            overlap_all_gather=safe if self.overlap_all_gather is None else self.overlap_all_gather,
        )

    @property
    def scattered(self) -> bool:
        """Whether activations are scattered."""
        return self.layout == "scattered"

    def cached(self) -> tuple[float, float]:
        """`cache_gathers` as the most layers and the most bytes."""
        value = self.cache_gathers
        if value == "all":
            return float("inf"), float("inf")
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value, float("inf")
        size = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMG]?)i?B", value) if isinstance(value, str) else None
        if size:
            return float("inf"), float(size[1]) * 2 ** {"": 0, "K": 10, "M": 20, "G": 30}[size[2]]
        raise ValueError(
            f'cache_gathers = {value!r} is neither a number of layers, "all", nor a size such as "2GiB"; correct it'
        )
