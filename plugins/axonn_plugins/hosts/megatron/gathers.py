"""Weights in z-shards inside a Megatron model: how its layers find their shard, and when shards are gathered ahead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from axonn_plugins.hosts.megatron import process_groups
from axonn_tp.comm.overlap import Gathers
from axonn_tp.grid.layout import Layout
from axonn_tp.grid.mesh import Mesh
from axonn_tp.layers.weight import SplitWeight
from axonn_tp.options import Options


class ModelGathers(Gathers):
    """The weight gathers of one model chunk."""

    def _startable(self, phase: str, layer: Any) -> bool:
        # A hook may yet fill in the shard, as with --overlap-param-gather, where it waits for the last step's update.
        return phase == "backward" or not layer._forward_pre_hooks


def options() -> Options:
    """The settings' choices.

    A pipeline stage holds the activations of several micro-batches, and would hold as many gathered weights: there they are
    let go after the forward pass and gathered again in backward.
    """
    return replace(process_groups.settings().options(), reshard_after_forward=process_groups.stages() > 1)


class OwnShards(SplitWeight):
    """A layer of a Megatron model: `weight` is always this rank's shard, with two dims, and may be another layer's."""

    hands_out_shards = True
    overlap_all_reduce: bool
    reshard_after_forward: bool
    regather_inputs: bool

    def _prepare(self, mesh: Mesh, layouts: Mapping[str, Layout]) -> None:
        chosen = options()
        self.mesh, self.layouts = mesh, layouts
        self.overlap_all_reduce, self.regather_inputs = chosen.overlap_all_reduce, chosen.regather_inputs
        self.reshard_after_forward = bool(chosen.reshard_after_forward)
        self.gathers = ModelGathers(mesh, chosen)
        self._lent: tuple[Tensor, ...] = ()

    @property  # type: ignore[misc]
    def weight(self) -> nn.Parameter | None:  # type: ignore[override]
        """This rank's shard; None where it is another layer's."""
        return self._parameters.get("weight")

    def lend(self, weight: Tensor) -> None:
        """Compute with another layer's shard."""
        self._lent = (weight,)

    def _shard(self) -> nn.Parameter:
        (shard,) = self._lent or (self.weight,)
        if shard is None:
            raise RuntimeError(
                "a layer made with skip_weight_param_allocation has no weight of its own; give its forward one"
            )
        return shard  # type: ignore[return-value]

    def summed_in(self, dtype: torch.dtype) -> torch.dtype:
        """As Megatron's flags promise for sums over data, of which z is a part."""
        return torch.promote_types(dtype, getattr(self._shard(), "axonn_summed_in", dtype))

    def send(self, grad: Tensor) -> Tensor:
        """Divided first where Megatron divides before it sums over data, so that fp16 does not overflow earlier."""
        divisor = getattr(self._shard(), "axonn_divisor", 1)
        grad = super().send(grad)
        return grad / divisor if divisor > 1 else grad

    def receive(self, grad: Tensor) -> Tensor:
        """Megatron's hook adds `.grad`, of the weight's type, to ``main_grad``: a wider sum is added before it would be rounded."""
        shard = self._shard()
        main = getattr(shard, "main_grad", None)
        if main is None or main.dtype == shard.dtype:
            return grad
        main.add_(grad.view_as(main))
        # What the hook asks, as after a kernel that computes a gradient into ``main_grad``.
        shard.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return shard.new_zeros(()).expand_as(shard)

    def block(self) -> Tensor:
        """The weight's block of this (x, y), gathered over z; differentiable."""
        return self.layouts["weight"].unflatten(self.gathers.block(self).reshape(-1), self.mesh.grid)

    def block_again(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """The same in backward, not differentiable."""
        return self.layouts["weight"].unflatten(self.gathers.again(self, source, dtype).reshape(-1), self.mesh.grid)
