"""What layers whose parameters are stored in shards have in common."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from axonn_tp.collectives import gather_weight, whole_parameter
from axonn_tp.layout import Layout, distribute
from axonn_tp.mesh import Mesh


class Split(nn.Module):
    """Mixed into a torch layer: the mesh, and the layouts of the layer's own parameters."""

    mesh: Mesh
    layouts: Mapping[str, Layout]

    def _split(self, mesh: Mesh, layouts: Mapping[str, Layout]) -> None:
        self.mesh, self.layouts = mesh, layouts
        for name, parameter in self._parameters.items():
            if parameter is not None:
                distribute(parameter, layouts[name], mesh.grid, mesh.coordinates)

    def remark(self) -> None:
        """Put the layouts back on the parameters of a copied layer: copying drops them."""
        for name, parameter in self._parameters.items():
            if parameter is not None:
                parameter.axonn_layout = self.layouts[name]  # type: ignore[attr-defined]


class SplitWeight(Split):
    """A layer with a weight over x, y and z: holds the shard, gathers the block, answers for `weight`."""

    def _shard(self) -> nn.Parameter:
        shard = self._parameters.get("weight")
        if shard is None:
            raise AttributeError("weight")
        return shard

    def _block(self, shard: Tensor) -> Tensor:
        """The block of this (x, y), gathered over z."""
        return self.layouts["weight"].unflatten(gather_weight(shard, self.mesh), self.mesh.grid)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """This rank's shard; in a model's forward, where all ranks meet, the whole weight, differentiable."""
        if "mesh" in self.__dict__ and self.mesh.in_forward:
            return whole_parameter(self._shard(), self.layouts["weight"], self.mesh)
        return self._shard()
