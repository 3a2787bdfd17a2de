"""torchtitan's optimizers over split parameters, with whole states in checkpoints: any grid, torchtitan itself and one process read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.utils import init_optim_state

from axonn_plugins.hosts.common.elementwise import check_optimizer
from axonn_plugins.hosts.torchtitan.parallelize import mesh_of
from axonn_tp import layout_of
from axonn_tp.layers.exports import as_shards, whole_tensor


class SplitOptimizers(OptimizersContainer):
    """`OptimizersContainer` of a model that may be split."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """As torchtitan's."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        self._mesh = mesh_of(model_parts[0])
        if self._mesh is not None and self._mesh.grid.world > self._mesh.grid.gdata:  # else nothing is split
            for optimizer in self.optimizers:
                check_optimizer(optimizer)

    def _split(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Names in torchtitan's state dict, parameters and states that are split as these are."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    for key, value in optimizer.state.get(parameter, {}).items():
                        if isinstance(value, Tensor) and value.shape == parameter.shape and layout_of(parameter).axes:
                            yield f"state.{name}.{key}", parameter, value

    def state_dict(self) -> dict[str, Any]:
        """Whole states by name; every rank calls it and gets all."""
        with as_shards():
            flat = super().state_dict()
        for key, parameter, value in self._split():
            assert self._mesh is not None
            flat[key] = whole_tensor(value, layout_of(parameter), self._mesh).cpu()
        return flat

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's parts of what `state_dict` gave on any grid."""
        for optimizer in self.optimizers:
            init_optim_state(optimizer)
        own = dict(state_dict)
        for key, parameter, _ in self._split():
            if key in own:
                assert self._mesh is not None
                own[key] = layout_of(parameter).shard(own[key], self._mesh.grid, self._mesh.coordinates)
        with as_shards():
            super().load_state_dict(own)
