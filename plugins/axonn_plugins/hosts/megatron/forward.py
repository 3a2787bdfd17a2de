"""A model chunk's forward pass: its layers share their weight gathers, and the first gathers start when it begins."""

from __future__ import annotations

import inspect
from typing import Any

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.gathers import ModelGathers, OwnShards, options
from axonn_plugins.hosts.megatron.sharing import stream_over
from axonn_tp.layers.linear import Linear
from axonn_tp.layers.tuning import TunedMatmul, Tuner
from axonn_tp.layers.tuning_cache import default_cache


class _Forward:
    """The state that the hooks of a model chunk share."""

    def __init__(self, model: Any) -> None:
        self.mesh = process_groups.mesh()
        self.layers = [module for module in model.modules() if isinstance(module, OwnShards)]
        chosen = options()
        self.gathers = ModelGathers(self.mesh, chosen)
        self.tuner = Tuner(self.mesh.device, default_cache()) if chosen.tune_matmuls else None
        # Stages come to their second step at other times, so that they cannot agree on what was measured.
        self.agrees = process_groups.stages() == 1
        for layer in self.layers:
            layer.gathers = self.gathers
            if self.tuner is not None and isinstance(layer, Linear):
                tokens = layer.operation.tokens
                layer.operation = TunedMatmul(self.tuner)
                layer.operation.tokens = tokens

    def enter(self, model: Any, inputs: tuple, keywords: dict[str, Any]) -> None:
        given = inspect.signature(type(model).forward).bind_partial(model, *inputs, **keywords).arguments
        if given.get("decoder_input") is not None and stream_over(process_groups.settings(), self.mesh):
            raise ValueError(
                "decoder_input is given: axonn3d's stream is a share of each token, which only input_ids become; leave it out"
            )
        self.gathers.enter()
        tuner = self.tuner
        if tuner is not None and self.agrees and tuner.stepped and not tuner.finished:
            tuner.finish()
        head = getattr(model, "output_layer", None)
        if head is not None and head.weight is None:
            head.lend(model.shared_embedding_or_output_weight())
        self.gathers.begin(self.layers)  # type: ignore[arg-type]

    def leave(self, model: Any, inputs: tuple, output: object) -> None:
        self.gathers.leave()


def watch_forward(model: Any) -> None:
    """Let a GPT model that was just made gather its weights ahead, and tune its products if that is wanted."""
    forward = _Forward(model)
    model.register_forward_pre_hook(forward.enter, prepend=True, with_kwargs=True)
    model.register_forward_hook(forward.leave, always_call=True)
