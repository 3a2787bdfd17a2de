"""A norm and the column-parallel layer after it as one module, as Transformer Engine's specs have them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.layers import ColumnParallelLinear
from axonn_plugins.hosts.megatron.norms import new_norm, whole_norm
from axonn_plugins.hosts.megatron.sharing import stream_over


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """Y = norm(X)·Wᵀ + b; the norm's parameters have the names that Transformer Engine gives them."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **others: Any) -> None:
        super().__init__(input_size, output_size, config=config, **others)
        settings, mesh = process_groups.settings(), process_groups.mesh()
        scattered = "x" in stream_over(settings, mesh)
        device = "cpu" if config.use_cpu_initialization else mesh.device
        if self.takes_whole:
            norm = whole_norm(config, input_size, mesh, device)
        else:
            norm = new_norm(config, mesh, scattered, "layer_norm", device, config.params_dtype)
        # Not a submodule, which would have its parameters once more.
        self._norm = (norm,)
        for name, parameter in norm.named_parameters():
            self.register_parameter(f"layer_norm_{name}", parameter)

    def forward(  # type: ignore[override]
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Share of X → share of Y, and the bias' share where it is not added."""
        return super().forward(self._norm[0](input_), weight, runtime_gather_output)
