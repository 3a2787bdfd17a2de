"""The ``"tensor_parallel"`` key as `axonn_tp` takes it."""

from __future__ import annotations

from dataclasses import fields

from axonn_plugins.config import ConfigError, TensorParallel
from axonn_tp import LayerPlan, Options

_OF_DEEPSPEED = (
    "machine",
    "tokens_per_sample",
    "trace_steps",
    "trace_folder",
    "broadcast_inputs",
    "check_every",
    "verify_plan",
)


def layer_plans(block: TensorParallel) -> dict[str, LayerPlan]:
    """The block's plan as axonn_tp takes it; nothing for "auto", which `auto_plan` finds in a model."""
    given = {} if block.plan == "auto" else block.plan
    return {
        pattern: LayerPlan(layer.kind, layer.parts, layer.heads, tuple(layer.counts), layer.reads, layer.whole_tokens)
        for pattern, layer in given.items()
    }


def options(block: TensorParallel) -> Options:
    """The block's choices as axonn_tp takes them; types of gradients are the host's to choose."""
    known = type(block).model_fields
    return Options(**{field.name: getattr(block, field.name) for field in fields(Options) if field.name in known})


def refuse_keys_of_deepspeed(block: TensorParallel, within: str) -> None:
    """Refuse keys that no other host obeys.

    Args:
        block: of a host that is not DeepSpeed.
        within: what stands before a key in the sentence.

    Raises:
        ConfigError: one is given.
    """
    for name in _OF_DEEPSPEED:
        checks = name == "verify_plan" and block.sequence > 1  # what shares sequences obeys it, under any host
        if name in block.model_fields_set and not checks:
            raise ConfigError(
                f"{within}{name} = {getattr(block, name)!r} is obeyed by DeepSpeed's engines alone; leave it out"
            )
