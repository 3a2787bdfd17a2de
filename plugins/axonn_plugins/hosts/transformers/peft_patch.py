"""PEFT's adapters of split layers: saved as its own files, and merged into whole weights; without the block nothing is different."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import nn

from axonn_plugins.config import ConfigError


def patch(module: ModuleType) -> None:
    """Add to ``peft.peft_model``; harmless when called again."""
    from peft.utils import other

    wrapper: Any = other.ModulesToSaveWrapper
    if getattr(wrapper.adapter_state_dict, "axonn", False):
        return
    wrapper.adapter_state_dict = _by_names(wrapper.adapter_state_dict)
    model = module.PeftModel
    model.get_nb_trainable_parameters = _counting(model.get_nb_trainable_parameters)
    model._setup_prompt_encoder = _whole_prompts(model._setup_prompt_encoder)
    from peft.tuners import tuners_utils as theirs

    tuners_utils: Any = theirs
    tuners_utils.onload_layer = _whole_too(tuners_utils.onload_layer)
    tuner = tuners_utils.BaseTuner
    for name in ("_unload_and_optionally_merge", "merge_adapter", "unmerge_adapter"):
        setattr(tuner, name, _together(getattr(tuner, name)))
    tuner.inject_adapter = _before_the_split(tuner.inject_adapter)
    tuners_utils.BaseTunerLayer.axonn_call_all = _call_all


def _by_names(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def adapter_state_dict(self: Any, *given: Any, **keywords: Any) -> Any:
        """PEFT's, which takes of a layer's state the names alone: rank 0 calls it with whole tensors, while no other does."""
        from axonn_tp.layers.exports import as_shards

        with as_shards():
            return original(self, *given, **keywords)

    adapter_state_dict.axonn = True  # type: ignore[attr-defined]
    return adapter_state_dict


def _counting(original: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    @wraps(original)
    def get_nb_trainable_parameters(self: Any) -> tuple[int, int]:
        """PEFT's own, of the serial model."""
        from axonn_plugins.hosts.transformers.trainer_sums import absent

        trained, of_all = original(self)
        return trained + absent(p for p in self.parameters() if p.requires_grad), of_all + absent(self.parameters())

    return get_nb_trainable_parameters


def _whole_prompts(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def _setup_prompt_encoder(self: Any, *given: Any, **keywords: Any) -> None:
        """PEFT's own; what makes prompts is not split, as the rank that saves them calls it alone."""
        original(self, *given, **keywords)
        self.prompt_encoder.axonn_whole = True

    return _setup_prompt_encoder


def _call_all(self: Any) -> None:
    """Use all adapters of a layer at once: on the copy in which a plan is searched, as any may be the active one later."""
    if not self.merged:
        self._active_adapter = self._all_available_adapter_names()


def _split_layers(model: nn.Module) -> list[Any]:
    from axonn_tp.layers.weight import Split

    return [module for module in model.modules() if isinstance(module, Split)]


def _together(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def changing(self: Any, *given: Any, **keywords: Any) -> Any:
        """PEFT's own, once all ranks are here: each layer's weights are gathered for it."""
        split = _split_layers(self.model)
        if split and split[0].mesh.size("grid") > 1:
            from axonn_tp.comm.meeting import meet

            what = "merging adapters into a model that is split over ranks, or taking them out,"
            meet(split[0].mesh.group("grid"), what, "or save the adapter, and merge it in one process")
        return original(self, *given, **keywords)

    return changing


def _whole_too(original: Callable[..., AbstractContextManager]) -> Callable[..., AbstractContextManager]:
    @contextmanager
    @wraps(original)
    def onload_layer(layer: nn.Module) -> Iterator[None]:
        """PEFT's own; inside, a split layer's parameters are whole, and what has become of them is split again behind it."""
        with torch.no_grad(), original(layer):
            shards = _gathered(layer)
            try:
                yield
            finally:
                for parameter, (module, layout, shard) in shards.items():
                    whole, parameter.data = parameter.data, shard
                    shard.copy_(layout.shard(whole, module.mesh.grid, module.mesh.coordinates))

    return onload_layer


def _gathered(layer: nn.Module) -> dict[nn.Parameter, tuple[Any, Any, torch.Tensor]]:
    from axonn_tp.layers.exports import whole_tensor

    shards: dict[nn.Parameter, tuple[Any, Any, torch.Tensor]] = {}
    for module in _split_layers(layer):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in shards:
                shards[parameter] = module, module.layouts[name], parameter.data
                parameter.data = whole_tensor(parameter.data, module.layouts[name], module.mesh)
    return shards


def _before_the_split(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *given: Any, **keywords: Any) -> None:
        if _split_layers(model):
            raise ConfigError(
                f"adapter {adapter_name!r} is added to a model that is split over ranks already, and would be split as nothing else is; add all adapters "
                "before the Trainer, accelerator.prepare or deepspeed.initialize takes the model"
            )
        original(self, model, adapter_name, *given, **keywords)

    return inject_adapter
