"""The layers of Transformer Engine's specs: ours, with its products and, where no rank has a share of a row, its norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from axonn_plugins.hosts.megatron import engine, process_groups
from axonn_plugins.hosts.megatron.layers import ColumnParallelLinear, Parallel, RowParallelLinear
from axonn_plugins.hosts.megatron.norms import new_norm, whole_norm
from axonn_plugins.hosts.megatron.parameters import mark
from axonn_plugins.hosts.megatron.products import EngineMatmul
from axonn_plugins.hosts.megatron.sharing import stream_over
from axonn_plugins.hosts.megatron.sizes import MULTIPLE
from axonn_tp.grid.mesh import Mesh
from axonn_tp.layers.layer_norm import norm_layout
from axonn_tp.layers.product import Matmul


class _EngineProducts(Parallel):
    def _new_operation(self, name: str) -> Matmul:
        found = engine.load()
        if found is None:
            return super()._new_operation(name)
        if getattr(self.config, "fp8", None):
            self._check_sizes(name)
        return EngineMatmul(self, found, self.config.gradient_accumulation_fusion)

    def _check_sizes(self, name: str) -> None:
        for size, what in zip(self.layouts["weight"].block_shape(self.mesh.grid), ("outputs", "inputs"), strict=True):
            if size % MULTIPLE:
                raise ValueError(
                    f"{name}: a rank has {size} of its {what}, and a product in 8 bits takes multiples of {MULTIPLE}; "
                    "choose another grid or other sizes, or leave --fp8-format out"
                )


class EngineColumnParallelLinear(_EngineProducts, ColumnParallelLinear):  # type: ignore[misc]
    """`ColumnParallelLinear` with Transformer Engine's product."""


class EngineRowParallelLinear(_EngineProducts, RowParallelLinear):  # type: ignore[misc]
    """`RowParallelLinear` with Transformer Engine's product."""


class LayerNormColumnParallelLinear(EngineColumnParallelLinear):
    """Y = norm(X)·Wᵀ + b; the norm's parameters have the names that Transformer Engine gives them."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **others: Any) -> None:
        super().__init__(input_size, output_size, config=config, **others)
        settings, mesh = process_groups.settings(), process_groups.mesh()
        scattered = "x" in stream_over(settings, mesh)
        device = "cpu" if config.use_cpu_initialization else mesh.device
        norm = None if self.takes_whole else _engine_norm(config, mesh, scattered, device)
        if self.takes_whole:
            norm = whole_norm(config, input_size, mesh, device)
        elif norm is None:
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


def _engine_norm(config: Any, mesh: Mesh, scattered: bool, device: torch.device | str) -> nn.Module | None:
    """Transformer Engine's norm; None where it is not installed, has none of the kind, or y splits rows."""
    found = engine.load()
    kind = None if found is None or mesh.size("y") > 1 else found.norms.get(config.normalization)
    if kind is None:
        return None
    norm = kind(config.hidden_size, eps=config.layernorm_epsilon, device=device, dtype=config.params_dtype)
    for parameter in norm.parameters():
        mark(parameter, norm_layout(tuple(parameter.shape), scattered), mesh)
    return norm
