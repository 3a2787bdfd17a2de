"""Linear layers of what every rank of x and y computes whole: each has all of the weight, and z splits none of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.layers import refuse_experts, refuse_others
from axonn_plugins.hosts.megatron.norms import whole_norm
from axonn_plugins.hosts.megatron.parameters import new_weight
from axonn_tp.grid.layout import Layout

_OF_SPLITS = ("gather_output", "input_is_parallel", "stride", "skip_bias_add", "tp_comm_buffer_name")
"""Arguments that say how a layer is split or for what, and who adds a bias, of which there is none here."""


class WholeLinear(nn.Module):
    """Y = X·Wᵀ of whole activations, by the arguments of Megatron's column- and row-parallel layers.

    Args:
        input_size: features of X.
        output_size: features of Y.
        config: Megatron's.
        init_method: fills the weight in place.
        bias: must be false.
        is_expert: must be false.
        others: Megatron's further arguments; those of `_OF_SPLITS` change nothing, of others see `layers.refuse_others`.

    Raises:
        ValueError: there is to be a bias, the layer is an expert's, or another argument asks for something.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool = False,
        is_expert: bool = False,
        **others: Any,
    ) -> None:
        refuse_experts(is_expert)
        refuse_others({name: value for name, value in others.items() if name not in _OF_SPLITS})
        super().__init__()
        if bias:
            raise ValueError("bias = True: a layer that every rank has whole is made without; set it to False")
        layout = Layout((output_size, input_size))
        self.weight = new_weight(layout, process_groups.mesh(), config, init_method, -1)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """X → Y, and no bias."""
        return F.linear(input_.to(self.weight.dtype), self.weight), None

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As Megatron's layers have; the arguments are those of `checkpoint.sharded_module`."""
        from axonn_plugins.hosts.megatron.checkpoint import sharded_module

        return sharded_module(self, *args, **kwargs)

    def get_extra_state(self) -> None:
        """None, as Megatron's own layers."""

    def set_extra_state(self, state: Any) -> None:
        """Ignored, as by Megatron's own layers."""


class WholeLayerNormLinear(WholeLinear):
    """Y = norm(X)·Wᵀ; the norm's parameters have the names that Transformer Engine gives them."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **others: Any) -> None:
        super().__init__(input_size, output_size, config=config, **others)
        norm = whole_norm(config, input_size, process_groups.mesh(), self.weight.device)
        # Not a submodule, which would have its parameters once more.
        self._norm = (norm,)
        for name, parameter in norm.named_parameters():
            self.register_parameter(f"layer_norm_{name}", parameter)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """X → Y, and no bias."""
        return super().forward(self._norm[0](input_))
