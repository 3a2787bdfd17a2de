"""A layer whose weight is stored in shards, and what reading the attribute `weight` gives."""

from __future__ import annotations

from torch import Tensor, nn

from axonn_tp.collectives import gather_weight, whole_parameter
from axonn_tp.layout import Layout, distribute
from axonn_tp.mesh import Mesh


class SplitWeight(nn.Module):
    """Mixed into `nn.Linear` and `nn.Embedding`: holds the shard, gathers the block, answers for `weight`."""

    mesh: Mesh
    weight_layout: Layout

    def _split_weight(self, mesh: Mesh, layout: Layout) -> None:
        self.mesh, self.weight_layout = mesh, layout
        distribute(self._shard(), layout, mesh.grid, mesh.coordinates)

    def _shard(self) -> nn.Parameter:
        shard = self._parameters.get("weight")
        if shard is None:
            raise AttributeError("weight")
        return shard

    def _block(self, shard: Tensor) -> Tensor:
        """The block of this (x, y), gathered over z."""
        return self.weight_layout.unflatten(gather_weight(shard, self.mesh), self.mesh.grid)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """This rank's shard; in a model's forward, where all ranks meet, the whole weight, differentiable."""
        if "mesh" in self.__dict__ and self.mesh.in_forward:
            return whole_parameter(self._shard(), self.weight_layout, self.mesh)
        return self._shard()
