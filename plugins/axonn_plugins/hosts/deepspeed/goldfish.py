"""DeepSpeed's own engine under ``axonn.goldfish``, where the block has no key that changes more; so ZeRO-3 is there."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import nn

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.deepspeed.agreement import compare
from axonn_plugins.hosts.deepspeed.engine import AxonnEngine
from axonn_plugins.hosts.deepspeed.labels import MaskedLabels, mask_of
from axonn_plugins.hosts.deepspeed.sections import enabled
from axonn_plugins.hosts.deepspeed.states_config import take_over


class GoldfishEngine(MaskedLabels):
    """The engine of `deepspeed.initialize` with the goldfish loss alone.

    One of ours where DeepSpeed's numbers would be wrong: in float64, which it does not sum, and in fp16 at ZeRO-0, whose loss it
    does not scale.
    """

    def __new__(cls, args: Any, model: nn.Module, *rest: Any, config_class: Any = None, **keywords: Any) -> Any:  # noqa: D102
        doubles = any(parameter.dtype == torch.float64 for parameter in model.parameters())
        unscaled = config_class.axonn_stage == 0 and enabled(config_class.axonn_raw, "fp16")
        if not (doubles or unscaled) or config_class.axonn_stage == 3 or keywords.get("mpu") is not None:
            return super().__new__(cls)
        take_over(config_class, "goldfish")
        deepspeed.DeepSpeedEngine = AxonnEngine
        return AxonnEngine(args, model, *rest, config_class=config_class, **keywords)

    def __init__(
        self, args: Any, model: nn.Module, optimizer: Any = None, *rest: Any, config_class: Any = None, **keywords: Any
    ) -> None:
        problem = None
        try:
            mask_of(config_class.axonn, model)
        except ConfigError as error:
            problem = str(error)
        compare(model, config_class, optimizer, keywords, problem)
        super().__init__(args, model, optimizer, *rest, config_class=config_class, **keywords)
