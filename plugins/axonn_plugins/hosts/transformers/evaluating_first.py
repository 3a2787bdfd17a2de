"""The Trainer's engines: the optimizer that a script gives, and ``evaluate`` and ``predict`` before it has trained.

Under DeepSpeed it makes an optimizer of its own, and refuses to evaluate first but for ZeRO-3. Here the model is split by an
engine without an optimizer; training makes another of the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from types import ModuleType
from typing import Any

import torch
from torch import nn

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common.split_states import whole_shapes
from axonn_plugins.hosts.transformers.readers import has_block

# Of the configuration: what says how the model is split, and its type.
_KEPT = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
    "torch_autocast",
)
_SPLITS = ("requires", "tensor_parallel", "ted", "pccl", "goldfish")


def patch(module: ModuleType) -> None:
    """Add to ``transformers.trainer``."""
    trainer = module.Trainer  # type: ignore[attr-defined]
    trainer.evaluation_loop = _evaluating(trainer.evaluation_loop)
    trainer._inner_training_loop = _training(trainer._inner_training_loop)
    module.deepspeed_init = _init(module.deepspeed_init)  # type: ignore[attr-defined]


def _init(original: Callable[..., tuple]) -> Callable[..., tuple]:
    @wraps(original)
    def deepspeed_init(trainer: Any, num_training_steps: int, inference: bool = False) -> tuple:
        """The Trainer's own, which makes an optimizer also where the script has given one; it has that here, and its scheduler."""
        if not has_block(trainer.accelerator):
            return original(trainer, num_training_steps, inference)
        if inference:
            return None, None
        _refuse_metrics(trainer)
        given, scheduler = trainer.axonn_optimizers
        if given is None:
            with whole_shapes(trainer.model):  # of a model that is split already, for who sorts parameters by them
                return original(trainer, num_training_steps)
        if "optimizer" in trainer.accelerator.state.deepspeed_plugin.deepspeed_config:
            raise ConfigError(
                f"the Trainer was given an optimizer ({type(given).__name__}, by optimizers=) and the DeepSpeed configuration has another; leave one of "
                "them out"
            )
        trainer.create_optimizer = partial(_use, trainer, given)
        try:
            optimizer, made = original(trainer, num_training_steps)
        finally:
            del trainer.create_optimizer
        return optimizer, scheduler if made is None else made

    return deepspeed_init


def _refuse_metrics(trainer: Any) -> None:
    """Refuse a schedule that goes by metrics where DeepSpeed steps it, which gives it the batch size instead.

    Raises:
        ConfigError: the configuration has an optimizer.
    """
    kind, raw = trainer.args.lr_scheduler_type, trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    if kind in ("reduce_lr_on_plateau", "greedy") and "optimizer" in raw and "scheduler" not in raw:
        raise ConfigError(
            f'lr_scheduler_type = "{getattr(kind, "value", kind)}" goes by what evaluations find, and DeepSpeed steps the schedule of an optimizer that stands '
            "in its configuration by itself, after each step; leave optimizer out there, and have the Trainer make it (optim, learning_rate)"
        )


def _use(trainer: Any, optimizer: Any, *rest: Any) -> Any:
    trainer.optimizer = optimizer
    return optimizer


def _evaluating(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def evaluation_loop(self: Any, *given: Any, **keywords: Any) -> Any:
        if not has_block(self.accelerator):
            return original(self, *given, **keywords)
        if self.deepspeed is not None:
            if hasattr(self, "model_preparation_time"):
                # The Trainer takes the first evaluation's from each later one's time, too, which then is below zero.
                self.model_preparation_time = 0.0
            return original(self, *given, **keywords)
        with _without_training(self.accelerator.state.deepspeed_plugin, self.model):
            return original(self, *given, **keywords)

    return evaluation_loop


def without_training(whole: Mapping[str, Any], left_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """A configuration with the block for an engine that has no optimizer."""
    reduced = {key: whole[key] for key in _KEPT if key in whole and key not in left_out}
    reduced["axonn"] = {key: value for key, value in whole["axonn"].items() if key in _SPLITS}
    return reduced | {"zero_optimization": {"stage": 0}}


@contextmanager
def _without_training(plugin: Any, model: nn.Module) -> Iterator[None]:
    """Weights in float32 stay that, for training begins with them."""
    from axonn_plugins.hosts.deepspeed.states import without_states

    in_float32 = all(p.dtype == torch.float32 for p in model.parameters() if p.is_floating_point())
    whole, types = plugin.deepspeed_config, ("bf16", "fp16") if in_float32 else ()
    plugin.deepspeed_config = plugin.hf_ds_config.config = without_training(whole, types)
    try:
        with without_states():
            yield
    finally:
        plugin.deepspeed_config = plugin.hf_ds_config.config = whole


def _training(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def loop(self: Any, *given: Any, **keywords: Any) -> Any:
        """The Trainer's, with a new engine where there was one: it ends that."""
        if self.deepspeed is not None and has_block(self.accelerator):
            self.model_wrapped, self.deepspeed = self.model, None
        return original(self, *given, **keywords)

    return loop
