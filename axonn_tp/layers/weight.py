"""The common part of layers whose parameters are stored in shards."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from axonn_tp.comm.collectives import whole_parameter
from axonn_tp.comm.overlap import Gathers
from axonn_tp.comm.own_calls import know_copies
from axonn_tp.comm.shard_gradients import OwnRead
from axonn_tp.comm.share_gradients import reads_on_share
from axonn_tp.comm.stalls import explained
from axonn_tp.compiled.casting import computing_dtype
from axonn_tp.grid.distribute import distribute
from axonn_tp.grid.layout import Layout
from axonn_tp.grid.mesh import Mesh
from axonn_tp.layers.exports import give_whole, in_shards, taken_shards
from axonn_tp.layers.whole_weight import WholeWeight
from axonn_tp.options import Options


class Split(nn.Module):
    """Mixed into a torch layer: the mesh, and the layouts of the layer's own parameters."""

    mesh: Mesh
    layouts: Mapping[str, Layout]
    hands_out_shards = False
    """True if `state_dict` and `load_state_dict` are about shards, as a host's own checkpoints may want them."""
    lies_apart = False
    """True if the mesh is the same ranks on a grid of this layer's own, as experts' is."""

    def _split(self, mesh: Mesh, layouts: Mapping[str, Layout]) -> None:
        self.mesh, self.layouts = mesh, layouts
        for name, parameter in self._parameters.items():
            if parameter is not None:
                distribute(parameter, layouts[name], mesh.grid, mesh.coordinates, mesh.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Split:
        """A copy, which trains as this does."""
        made: Split = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(deepcopy(self.__dict__, memo))
        made.remark()
        know_copies(self._parameters, made._parameters)
        return made

    def _on_shares(self) -> AbstractContextManager[None]:
        """Inside, the layer computes with parameters that it uses on this rank's tokens alone."""
        partial = {
            name: ranks
            for name, layout in self.layouts.items()
            if layout.partial and (ranks := self.mesh.size(layout.partial[0])) > 1
        }
        return reads_on_share(self, partial) if partial else nullcontext()

    def remark(self) -> None:
        """Put the layouts back on the parameters: torch's copies, and parameters that take another's place, have none."""
        for name, parameter in self._parameters.items():
            if parameter is not None:
                parameter.axonn_layout = self.layouts[name]  # type: ignore[attr-defined]

    def _apply(self, fn: Any, recurse: bool = True) -> Split:
        """Conversions as torch's; one may put other parameters in the place of these (`torch.__future__`)."""
        before = dict(self._parameters)
        super()._apply(fn, recurse)
        if any(self._parameters[name] is not parameter for name, parameter in before.items()):
            self.remark()
            know_copies(before, self._parameters)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not (self.hands_out_shards or in_shards()):
            give_whole(self, self.layouts, self.mesh, destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if not (self.hands_out_shards or in_shards()):
            state_dict = taken_shards(self, self.layouts, self.mesh, state_dict, prefix, error_msgs)
        before = dict(self._parameters)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if local_metadata.get("assign_to_params_buffers", False):
            self.remark()
            know_copies(before, self._parameters)


class SplitWeight(Split):
    """A layer with a weight over x, y and z: holds the shard, gathers the block, answers for `weight`."""

    gathers: Gathers
    axonn_name: str
    """The layer's name in the model."""

    def _split(self, mesh: Mesh, layouts: Mapping[str, Layout]) -> None:
        super()._split(mesh, layouts)
        self.gathers = Gathers(mesh, Options())

    def _shard(self) -> nn.Parameter:
        shard = self._parameters.get("weight")
        if shard is None:
            raise AttributeError(self._made())
        return shard

    def _made(self) -> str:
        return (
            f"the weight of layer {getattr(self, 'axonn_name', type(self).__name__)} is split, and cannot be made of other parameters, as weight_norm, "
            "spectral_norm, torch.nn.utils.parametrize and prune do; use these before the model is split, which leaves such a layer whole"
        )

    def compute_dtype(self, shard: Tensor) -> torch.dtype:
        """The type that the layer computes in: autocast's where it is on, as torch casts."""
        return computing_dtype(shard)

    def summed_in(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which gradients of the weight that are computed in `dtype` are summed over z."""
        return self.gathers.options.summed_in(dtype)

    def send(self, grad: Tensor) -> Tensor:
        """The gradient of the weight's block, flat, as it is summed over z: in the type of `summed_in`."""
        return grad.to(self.summed_in(grad.dtype))

    def receive(self, grad: Tensor) -> Tensor:
        """The gradient that autograd adds to the shard's `.grad`: that of one backward pass, summed over z."""
        return grad

    def block(self) -> Tensor:
        """The weight's block of this (x, y), gathered over z; differentiable.

        Raises:
            ValueError: something else than a shard lies in the shard's place.
        """
        try:
            return self.layouts["weight"].unflatten(self.gathers.block(self), self.mesh.grid)
        except RuntimeError:
            shard = self._shard()
            if shard.numel() == self.layouts["weight"].local_numel(self.mesh.grid):
                raise
            raise ValueError(
                f"layer {getattr(self, 'axonn_name', self)} was called with another weight, of shape {tuple(shard.shape)}, in the place of its shard, as by "
                'torch.func.functional_call; give it {"kind": "replicated"} in the plan, which keeps it whole on every rank'
            ) from None

    def block_source(self) -> Tensor:
        """The shard that the last `block` was made of; where several forwards are under way, each remembers its own."""
        return self.gathers.source(self)

    def block_again(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """The block once more in backward, not differentiable, for a layer that let it go after its forward."""
        return self.layouts["weight"].unflatten(self.gathers.again(self, source, dtype), self.mesh.grid)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """This rank's shard; in the forward of a model, or of a part of it, where all ranks meet, the whole weight, differentiable."""
        if "gathers" in self.__dict__ and (self.gathers.in_forward or self.gathers.parts):
            shard = self._shard()
            if self.mesh.size("z") == 1:
                whole = whole_parameter(shard, self.layouts["weight"], self.mesh)
            else:
                self.gathers.note(self, "the weight of ")
                with explained(self.mesh.group("z")):
                    whole = whole_parameter(OwnRead.apply(shard), self.layouts["weight"], self.mesh)
            copied = whole.data_ptr() != shard.data_ptr()
            return WholeWeight.of(whole, getattr(self, "axonn_name", type(self).__name__)) if copied else whole
        return self._shard()

    @weight.setter
    def weight(self, value: Any) -> None:
        raise AttributeError(self._made())
