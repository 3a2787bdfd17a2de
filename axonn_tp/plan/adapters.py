"""PEFT's adapters that cannot be split with their layer, or put prompts before sequences that ranks share."""

from __future__ import annotations

from typing import Any

from torch import nn

from axonn_tp.grid.mesh import Grid
from axonn_tp.layers.linear_split import features


def refuse_adapters(model: nn.Module, grid: Grid) -> None:
    """Refuse adapters that read or replace the whole weight of a linear, which is split, and prompts before shared sequences.

    Raises:
        ValueError: names the first.
    """
    for name, config in (getattr(model, "peft_config", None) or {}).items() if grid.sequence > 1 else ():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"PEFT's {type(config).__name__} (adapter {name!r}) puts a prompt of its own before each sequence, which ranks that share sequences would "
                "each put before their share; give gz as a number, so that no ranks share sequences, or use an adapter of layers, as LoraConfig"
            )
    for name, module in model.named_modules():
        base: Any = module.get_base_layer() if hasattr(module, "get_base_layer") else None  # type: ignore[operator]
        if base is None or not features(base):
            continue
        if type(module).__name__ == "ParamWrapper":
            raise ValueError(
                f"target_parameters of PEFT's LoraConfig names {module.parameter_name} of the linear layer {name}, which is split and has no such "
                "parameter as a whole; name the layer in target_modules, which adapts the same weight"
            )
        if grid.gx * grid.gy * grid.gz > 1 and len(getattr(module, "lora_magnitude_vector", ())):
            raise ValueError(
                f"use_dora = True of PEFT's LoraConfig takes norms over the whole weight of the linear layer {name}, which is split; leave it out, for "
                "LoRA without magnitudes (use_rslora = True scales it by its rank), or train with data parallelism alone"
            )
