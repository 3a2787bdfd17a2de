"""Options of a parallel model's work; every choice but that of BatchNorm's statistics computes the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from axonn_tp.comm.collectives import Collective
from axonn_tp.context.chunks import HOW

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
        overlap_all_gather: OAG, the next layer's weight is gathered over z while this layer computes.
        reshard_after_forward: let gathered weights go after the forward pass and gather them again in backward (as FSDP
            does by default); otherwise they are kept. A share between 0 and 1 lets those of the first layers go, at least so much
            of all of them, and keeps the last layers', which backward needs first.
        regather_inputs: keep of a scattered input only this rank's share and gather it again in backward, while the input
            gradient is computed: one all-gather more for each layer, and activations kept that are smaller by gx or gy.
        cache_gathers: under activation checkpointing, how many layers keep their gathered weight from forward to
            recomputation: a number, ``"all"``, or a size such as ``"2GiB"`` for as many as that memory holds.
        bucket_bytes: weights that are gathered over z one after another share a call until it gathers so many bytes, and sums of their
            gradients likewise; 0: each has its own.
        gradient_dtype: ``"float32"``: gradients of parameters of lower precision are summed over ranks and accumulated over
            backward passes in float32, and `.grad` is float32 (as Megatron's ``accumulate_allreduce_grads_in_fp32``); weight
            gradients that autocast computes in lower precision are summed over z in float32 too, with twice the bytes. None:
            in the type they are computed in.
        sync_batch_norm: BatchNorm takes the statistics of the samples of all ranks of z and data, as one rank with the whole batch
            would; otherwise those of each rank's own samples, as under DDP.
        attention: where ranks of z share sequences: ``"gather"`` keys and values that queries see at once, hand them on in a
            ``"ring"`` while computing, or deal out ``"heads"``, of which each rank then has all tokens; ``"auto"``: as
            `axonn_tp.context.chunks.cheaper` says.
        verify_plan: where ranks of z share sequences, run the beginning of the first batch whole as well, and refuse a model that
            computes something else on shares.
        tune_matmuls: time every distinct matmul of the first step as NN, NT and TN and keep the fastest (§5.1.3).
        compile: `torch.compile` traces the layers (`axonn_tp.compiled`), collectives and all, in place of leaving them as they are. Only
            with ``layout="replicated"``; overlap is then the compiler's.

    Raises:
        ValueError: names the option, its value and what is allowed.
    """

    layout: str = "scattered"
    overlap_all_reduce: bool = True
    overlap_reduce_scatter: bool = True
    overlap_all_gather: bool = True
    reshard_after_forward: bool | float = False
    regather_inputs: bool = False
    cache_gathers: int | str = 0
    bucket_bytes: int = 2**18
    gradient_dtype: str | None = None
    sync_batch_norm: bool = False
    tune_matmuls: bool = False
    attention: str = "auto"
    verify_plan: bool = True
    compile: bool = False

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f'layout = {self.layout!r} is not known; use "scattered" or "replicated"')
        share = self.reshard_after_forward
        if not isinstance(share, (bool, int, float)) or not 0 <= share <= 1:
            raise ValueError(
                f"reshard_after_forward = {share!r} is neither true, false nor a share of the gathered weights between 0 and 1; correct it"
            )
        if self.attention not in ("auto", *HOW):
            raise ValueError(f'attention = {self.attention!r} is not known; use "auto", "gather", "ring" or "heads"')
        if self.gradient_dtype not in (None, "float32"):
            raise ValueError(f'gradient_dtype = {self.gradient_dtype!r} is not known; use "float32" or None')
        if self.gradient_dtype and not hasattr(torch.Tensor, "grad_dtype"):
            raise ValueError(
                f'gradient_dtype = "float32" needs tensors with a grad_dtype, which torch {torch.__version__} lacks; '
                "install torch 2.13, or leave it out"
            )
        if not isinstance(self.bucket_bytes, int) or isinstance(self.bucket_bytes, bool) or self.bucket_bytes < 0:
            raise ValueError(
                f"bucket_bytes = {self.bucket_bytes!r} is no number of bytes; give one, or 0 to have each weight gathered alone"
            )
        self.cached()
        for name, held, needed in self._not_compiled() if self.compile else ():
            raise ValueError(
                f"{name} = {held!r} does not go with compile = True, which traces the plain collectives alone; use {name} = {needed!r}, "
                "or leave compile out: torch.compile then leaves split layers as they are"
            )

    def _not_compiled(self) -> Iterator[tuple[str, object, object]]:
        """Options that cannot be compiled: name, value, and the one that can."""
        needed = {
            "layout": "replicated",
            "reshard_after_forward": False,
            "regather_inputs": False,
            "cache_gathers": 0,
            "gradient_dtype": None,
            "sync_batch_norm": False,
            "tune_matmuls": False,
        }
        for name, value in needed.items():
            if getattr(self, name) != value:
                yield name, getattr(self, name), value

    @property
    def scattered(self) -> bool:
        """True if activations are scattered."""
        return self.layout == "scattered"

    def summed_in(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which gradients that are computed in `dtype` are summed."""
        return torch.promote_types(dtype, torch.float32) if self.gradient_dtype else dtype

    def itemsize(self, collective: Collective, dtype: torch.dtype) -> int:
        """Bytes of one element of a layer's collective where the layer computes in `dtype`."""
        # Over z nothing but gradients of weights is reduce-scattered.
        gradient = (collective.op, collective.axis) == ("reduce_scatter", "z")
        return (self.summed_in(dtype) if gradient else dtype).itemsize

    def cached(self) -> tuple[float, float]:
        """`cache_gathers` as the most layers and the most bytes."""
        value = self.cache_gathers
        if value == "all":
            return float("inf"), float("inf")
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value, float("inf")
        size = re.fullmatch(r"(\d+(?:\.\d+)?) *((?:[KMG]i)?)B", value) if isinstance(value, str) else None
        if size:
            return float("inf"), float(size[1]) * 2 ** {"": 0, "Ki": 10, "Mi": 20, "Gi": 30}[size[2]]
        raise ValueError(
            f'cache_gathers = {value!r} is neither a number of layers, "all", nor a size such as "2GiB"; correct it'
        )
