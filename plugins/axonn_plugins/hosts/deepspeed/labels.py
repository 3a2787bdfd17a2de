"""DeepSpeed's engine under ``axonn.goldfish``: the model gets labels in which targets are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from axonn_plugins.config import Axonn, ConfigError
from axonn_plugins.hosts.common.goldfish import LabelMask
from axonn_plugins.hosts.deepspeed.sections import enabled, refuse, refuse_pipeline


def mask_of(block: Axonn, model: nn.Module) -> LabelMask | None:
    """The mask for the labels of a model's calls; None without the key.

    Raises:
        ConfigError: the model takes none.
    """
    return None if block.goldfish is None else LabelMask(block.goldfish, model)


def check(block: Axonn, raw: Mapping[str, Any], mpu: Any) -> None:
    """Refuse what the key cannot go with.

    Args:
        block: the block.
        raw: the whole configuration.
        mpu: the user's model parallel unit, or the pipeline's.

    Raises:
        ConfigError: the first.
    """
    if block.goldfish is None:
        return
    if block.pipeline is None:
        refuse_pipeline("axonn.goldfish", mpu)
        if hasattr(deepspeed, "DualPipeVEngine"):
            deepspeed.DualPipeVEngine = _DualPipe
    refuse(
        [
            (
                raw.get("sequence_parallel_size", 1) != 1,
                "sequence_parallel_size has the script split rows of labels, and axonn.goldfish masks whole rows; use "
                "axonn.tensor_parallel.gz.sequence, or mask them before they are split by axonn_plugins.goldfish.goldfish_labels",
            ),
            (enabled(raw, "hybrid_engine"), "hybrid_engine has an engine of its own; remove it, or axonn.goldfish"),
        ]
    )


class _DualPipe:
    def __init__(self, *rest: Any, **keywords: Any) -> None:
        raise ConfigError(
            "axonn.goldfish masks labels on their way to a model or to axonn.pipeline, and the model is a DualPipeVModule; leave the key out, or "
            "make the model a PipelineModule"
        )


class MaskedLabels(DeepSpeedEngine):
    """The part of an engine that masks labels.

    Attributes:
        label_mask: None without the key.
    """

    def __init__(
        self, args: Any, model: nn.Module, optimizer: Any = None, *rest: Any, config_class: Any = None, **keywords: Any
    ) -> None:
        self.label_mask = mask_of(config_class.axonn, model)
        super().__init__(args, model, optimizer, *rest, config_class=config_class, **keywords)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's forward, with labels in which targets are left out."""
        mask, training = self.label_mask, self.module.training
        if mask is None:
            return super().forward(*inputs, **keywords)
        inputs, keywords = mask.arguments(inputs, keywords, training)
        weight = mask.weight(inputs, keywords, training, self.data_parallel_group, self.device)
        if weight is None:
            return super().forward(*inputs, **keywords)
        with weight:
            output = super().forward(*inputs, **keywords)
        return weight.of(output)
