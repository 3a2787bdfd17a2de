"""The settings that the flags ask for, and all that the rest of this package knows of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from axonn_tp import Options

LAYOUTS = ("scattered", "replicated")
"""The first is the default."""
OVERLAPS = ("all-reduce", "reduce-scatter", "all-gather")
"""Words of ``--axonn-overlap``: OAR, ORS, OAG."""
TRAVEL = {"p2p": "ring", "all_gather": "gather", "a2a": "heads"}
"""Words of ``--cp-comm-type``, and what `axonn_tp.context` calls them."""


@dataclass(frozen=True)
class Settings:
    """The grid and the choices of ``--tensor-model-parallel-impl axonn3d``.

    Attributes:
        gx: ranks that split attention heads and the output features of column-parallel layers.
        gy: ranks that split the hidden size.
        gz: ranks that split every weight, and the batch; they are part of Megatron's data-parallel ranks.
        layout: of activations, as `axonn_tp.Options.layout`.
        overlap_all_reduce: OAR, as in `axonn_tp.Options`.
        overlap_reduce_scatter: ORS.
        overlap_all_gather: OAG.
        cache_gathers: under recomputation, the layers that keep their gathered weight: a number, ``"all"`` or a size.
        tune_matmuls: time the first step's products as NN, NT and TN and keep the fastest.
    """

    gx: int = 1
    gy: int = 1
    gz: int = 1
    layout: str = "scattered"
    overlap_all_reduce: bool = True
    overlap_reduce_scatter: bool = True
    overlap_all_gather: bool = True
    cache_gathers: int | str = 0
    tune_matmuls: bool = False

    @property
    def tensor(self) -> int:
        """Megatron's tensor-model-parallel size."""
        return self.gx * self.gy

    def options(self) -> Options:
        """The same choices for `axonn_tp`.

        Raises:
            ValueError: one of them is not known.
        """
        from axonn_tp import Options

        return Options(
            layout=self.layout,
            overlap_all_reduce=self.overlap_all_reduce,
            overlap_reduce_scatter=self.overlap_reduce_scatter,
            overlap_all_gather=self.overlap_all_gather,
            cache_gathers=self.cache_gathers,
            tune_matmuls=self.tune_matmuls,
        )
