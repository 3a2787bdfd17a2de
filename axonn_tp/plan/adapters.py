"""Adapters that cannot be split with their layer."""

from __future__ import annotations

from torch import nn

from axonn_tp.layers.linear_split import features


def refuse_adapted_weights(model: nn.Module) -> None:
    """Refuse PEFT's adapters of a linear's weight itself, in whose place another stands while the layer is called.

    Raises:
        ValueError: names the first.
    """
    for name, module in model.named_modules():
        if type(module).__name__ == "ParamWrapper" and features(module.get_base_layer()):
            raise ValueError(
                f"target_parameters of PEFT's LoraConfig names {module.parameter_name} of the linear layer {name}, which is split and has no such "
                "parameter as a whole; name the layer in target_modules, which adapts the same weight"
            )
