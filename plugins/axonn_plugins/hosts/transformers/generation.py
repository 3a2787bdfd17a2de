"""``generate`` on ranks that gather weights from each other: all call the model equally often, as with ZeRO-3; else nothing is different."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def patch(module: ModuleType) -> None:
    """Add to ``transformers.generation.utils``; harmless when called again."""
    kind = module.GenerationMixin
    if not getattr(kind.generate, "axonn", False):
        kind.generate = _together(kind.generate)
        kind._assisted_decoding = _each_its_own(kind._assisted_decoding)


def _together(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def generate(self: Any, *given: Any, **keywords: Any) -> Any:
        """The model's own; a rank whose sequences have ended goes on until those of all have."""
        if gathers(self):
            keywords["synced_gpus"] = True
        with _drawing_alike(self):
            return original(self, *given, **keywords)

    generate.axonn = True  # type: ignore[attr-defined]
    return generate


@contextmanager
def _drawing_alike(model: nn.Module) -> Iterator[None]:
    """Inside, ranks that write the same sequences draw the same words, whatever was drawn or seeded on them before."""
    mesh: Any = next((module.mesh for module in model.modules() if hasattr(module, "axonn_name")), None)
    if mesh is None or mesh.size("replicas") == 1:
        yield
        return
    from axonn_plugins.hosts.common.replicas import align_random_state, set_random_state

    own = align_random_state(mesh, "replicas")
    try:
        yield
    finally:
        if mesh.size("replicas") > mesh.size("model") and mesh.rank("sequence"):  # which draw for tokens of their own
            set_random_state(own, mesh)


def _each_its_own(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _assisted_decoding(self: Any, ids: Tensor, *given: Any, synced_gpus: bool = False, **named: Any) -> Any:
        """The model's own, which where ranks wait for each other writes on behind the end of a sequence; a rank that is done calls the model on a token."""
        if not synced_gpus or not gathers(self):
            return original(self, ids, *given, synced_gpus=synced_gpus, **named)

        def any_goes_on(this: bool) -> bool:
            told = torch.tensor(float(this), device=ids.device)
            dist.all_reduce(told)
            return told.item() > 0

        before_each = self.register_forward_pre_hook(lambda *_: any_goes_on(True) and None, prepend=True)
        try:
            found = original(self, ids, *given, synced_gpus=False, **named)
        finally:
            before_each.remove()
        encoded, token = named.get("encoder_outputs"), ids[:, :1]
        one = {"input_ids": token} if encoded is None else {"decoder_input_ids": token, "encoder_outputs": encoded}
        while any_goes_on(False):
            self(**one, use_cache=False)
        return found

    return _assisted_decoding


def gathers(model: nn.Module) -> bool:
    """True if ranks that read different data need each other for the model's forward."""
    layouts = [(parameter, getattr(parameter, "axonn_layout", None)) for parameter in model.parameters()]
    return any(
        layout is not None and (layout.home or layout.over_z and parameter.dim() < len(layout.shape))  # flat, over z
        for parameter, layout in layouts
    )
