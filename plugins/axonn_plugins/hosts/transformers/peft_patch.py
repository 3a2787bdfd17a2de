"""PEFT's adapters of split layers: saved as its own files, and merged into whole weights; without the block nothing is different."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from operator import attrgetter
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
            shards = gathered(layer)
            try:
                yield
            finally:
                for parameter, (module, layout, shard) in shards.items():
                    whole, parameter.data = parameter.data, shard
                    shard.copy_(layout.shard(whole, module.mesh.grid, module.mesh.coordinates))

    return onload_layer


def gathered(layer: nn.Module) -> dict[nn.Parameter, tuple[Any, Any, torch.Tensor]]:
    """Make the parameters of split layers whole, and give the layer, the layout and the shard of each; all ranks call it."""
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


def patch_swaps(module: ModuleType) -> None:
    """Add to ``peft.utils.hotswap``; harmless when called again."""
    if getattr(module.hotswap_adapter_from_state_dict, "axonn", False):
        return
    module.hotswap_adapter_from_state_dict = _swapping(module.hotswap_adapter_from_state_dict)  # type: ignore[attr-defined]
    module.prepare_model_for_compiled_hotswap = _padding(module.prepare_model_for_compiled_hotswap)  # type: ignore[attr-defined]


def _swapping(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def hotswap_adapter_from_state_dict(
        model: Any, state_dict: dict[str, torch.Tensor], *given: Any, **named: Any
    ) -> None:
        """PEFT's own, given this rank's shard of what a split layer takes.

        Raises:
            ConfigError: a tensor is larger than that which it takes the place of.
        """
        from axonn_tp.layers.exports import as_shards

        split = {id(p): (one, name) for one in _split_layers(model) for name, p in one._parameters.items()}
        taken = dict(state_dict)
        for key, whole in state_dict.items():
            try:
                layer, name = split[id(attrgetter(key)(model))]
            except (AttributeError, KeyError):
                continue
            shape = tuple(layer.layouts[name].serial_shape)
            if whole.dim() != len(shape) or any(new > old for new, old in zip(whole.shape, shape, strict=True)):
                raise ConfigError(
                    f"hot-swapping gives {key}, which is split over ranks, a tensor of shape {tuple(whole.shape)} where it has {shape}; swap in an adapter "
                    "of no larger rank, or load it before the Trainer, accelerator.prepare or deepspeed.initialize takes the model"
                )
            padded = whole.new_zeros(shape)
            padded[tuple(map(slice, whole.shape))] = whole
            taken[key] = layer.layouts[name].shard(padded, layer.mesh.grid, layer.mesh.coordinates)
        with as_shards():  # PEFT takes the names alone
            original(model, taken, *given, **named)

    hotswap_adapter_from_state_dict.axonn = True  # type: ignore[attr-defined]
    return hotswap_adapter_from_state_dict


def _padding(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def prepare_model_for_compiled_hotswap(model: nn.Module, *given: Any, **named: Any) -> None:
        if _split_layers(model):
            raise ConfigError(
                "prepare_model_for_compiled_hotswap is called on a model that is split over ranks already, whose shards it would pad; call it before the "
                "Trainer, accelerator.prepare or deepspeed.initialize takes the model"
            )
        original(model, *given, **named)

    return prepare_model_for_compiled_hotswap
