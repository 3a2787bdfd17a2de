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
from axonn_plugins.hosts.deepspeed.states_config import take_over


class GoldfishEngine(MaskedLabels):
    """The engine of `deepspeed.initialize` with the goldfish loss alone; in float64, which DeepSpeed does not sum, one of ours."""

    def __new__(cls, args: Any, model: nn.Module, *rest: Any, config_class: Any = None, **keywords: Any) -> Any:  # noqa: D102
        doubles = any(parameter.dtype == torch.float64 for parameter in model.parameters())
        if not doubles or config_class.axonn_stage == 3 or keywords.get("mpu") is not None:
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
