"""HF's models on shared sequences: attention by their registry of attention functions, and labels shifted before they are cut."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from axonn_tp.context.attention import attend, drawn_seed
from axonn_tp.context.chunks import Sight
from axonn_tp.context.sums import current
from axonn_tp.layers.activation import plain, split_as

NAME = "axonn_shared_sequences"


class _Named(str):
    """`NAME` where it stands for a configuration's own attention function.

    Attributes:
        own: that function's name.
    """

    own: str | None = None


@dataclass
class Published:
    """A model of HF's.

    Attributes:
        models: of its modules those that are models.
        configs: each with the attention function that it had.
    """

    models: list[nn.Module]
    configs: list[tuple[Any, str]] = field(default_factory=list)


def published_in(model: nn.Module) -> list[nn.Module]:
    """HF's models among the modules."""
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def adopt(model: nn.Module) -> Published | None:
    """Have HF's models among the modules use `attend`; None where there are none, or they do not let attention be chosen."""
    models: list[Any] = published_in(model)
    if not models or not all(module._can_set_attn_implementation() for module in models):
        return None
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    held: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    found = {id(config): config for config in held if getattr(config, "_attn_implementation", None)}
    configs = [(config, config._attn_implementation) for config in found.values()]
    for config, own in configs:
        config._attn_implementation_internal = _named(own)
    for one in models:
        _shift_before(one)
    return Published(models, configs)


def _named(own: str) -> _Named:
    name = _Named(NAME)
    name.own = own
    return name


def takes(published: Published | None, model: nn.Module, name: str) -> bool:
    """True if a model has this argument of HF's, or hands it on."""
    if published is None or name not in inspect.signature(published.models[0].forward).parameters:
        return False
    own = inspect.signature(model.forward).parameters
    return name in own or any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values())


def join_routers(published: Published, model: nn.Module) -> None:
    """Have models inside `model` say what their routers said of all tokens, as losses of how these spread over the experts need it.

    The mask that such a loss reads, too, is whole, and is kept from the models inside, whose attention knows of it.
    """

    def without_mask(inner: Any, inputs: tuple, keywords: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        call = inner.axonn_sequences.now
        if call is not None and "attention_mask" in keywords:
            keywords = keywords | {"attention_mask": None}
        return inputs, keywords

    def joined(inner: Any, inputs: tuple, output: Any) -> Any:
        return with_routers(inner.axonn_sequences.now, output)

    for one in published.models:
        if one is not model:
            one.register_forward_pre_hook(without_mask, with_kwargs=True)
            one.register_forward_hook(joined)


def with_routers(call: Any, output: Any) -> Any:
    """A model's output, whose router logits are of all tokens; every rank goes on with the same."""
    found = getattr(output, "router_logits", None)
    if call is not None and isinstance(found, (tuple, list)):
        times = call.mesh.size("sequence")
        output.router_logits = tuple(
            call.all_rows(one, times) if isinstance(one, Tensor) and one.shape[:1] == (call.rows,) else one
            for one in found
        )
    return output


# TRL's head, which gives numbers of each token in the place of logits, and is an attribute of the model that calls the class's forward

FUSED = "fused_lm_head"


class _OnShares:
    """A forward of a model's own, computed on shares; a copy of the model has its own."""

    def __init__(self, model: Any, own: Callable[..., Any]) -> None:
        update_wrapper(self, own)
        self._model, self._own = model, own

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        return self._model.axonn_sequences.run(self._model, self._called, inputs, keywords)

    def _called(self, model: nn.Module, *inputs: Any, **keywords: Any) -> Any:
        return self._own(*inputs, **keywords)


def share_own_forward(model: Any) -> None:
    """Have a forward of the model's own, as TRL's, compute on shares as well: it calls that of the class as it was before."""
    own = vars(model).get("forward")
    if own is not None:
        model.forward = _OnShares(model, own)


def shifted_for_head(call: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments with labels that were shifted while they were whole, where TRL's head is asked for, which would shift those of a share."""
    if not arguments.get(FUSED) or arguments.get("shift_labels") is not None or call.labels is None:
        return arguments
    call.head = arguments.get("num_items_in_batch")
    shifted = torch.nn.functional.pad(call.labels[:, 1:], (0, 1), value=-100)
    return arguments | {"labels": None, "shift_labels": call.cut(shifted)}


def joined(call: Any, output: Any) -> Any:
    """A model's output with all tokens."""
    output = with_routers(call, output)
    mask = getattr(output, "label_mask", None)
    if mask is None or getattr(output, "log_probs", None) is None:
        return call.joined(output)

    def mean(found: Any) -> Tensor:
        items = found.label_mask.sum().clamp(min=1) if call.head is None else call.head
        return -found.log_probs.sum() / items

    balance = output.loss - mean(output)
    for name, value in output.items():
        if isinstance(value, Tensor) and value.dim() == 2:  # the last token has no next
            output[name] = call.whole(value.byte() if value.dtype == torch.bool else value)[:, :-1].to(value.dtype)
    output.loss = mean(output) + balance
    return output


def with_logits_at(output: Any, kept: int | Tensor) -> Any:
    """A model's output whose logits are of the last tokens, so many, or of those of these numbers; of all where it is 0."""
    if not isinstance(kept, Tensor) and kept == 0:
        return output
    at = kept if isinstance(kept, Tensor) else slice(-kept, None)
    if isinstance(output, tuple):
        return output[0][:, at], *output[1:]
    output.logits = output.logits[:, at]
    return output


@contextmanager
def stock(published: Published | None) -> Iterator[None]:
    """Inside, attention is the model's own."""
    configs = [] if published is None else published.configs
    for config, own in configs:
        config._attn_implementation_internal = own
    try:
        yield
    finally:
        for config, own in configs:
            config._attn_implementation_internal = _named(own)


class _Shifted:
    """A model's loss of next tokens, given labels that were shifted while they were whole."""

    def __init__(self, model: Any, original: Callable) -> None:
        self._model, self._original = model, original

    def __call__(self, logits: Tensor, labels: Tensor, *rest: Any, **keywords: Any) -> Tensor:
        call = self._model.axonn_sequences.now
        if call is not None:
            if labels is not call.label_share:
                raise ValueError(
                    f"{type(self._model).__name__} makes labels of its own of those that it is given, which cannot be shifted over the "
                    "ranks that share a sequence; leave labels out, and compute the loss of the logits outside"
                )
            ignored = keywords.get("ignore_index", -100)
            shifted = torch.nn.functional.pad(call.labels[..., 1:], (0, 1), value=ignored)
            keywords["shift_labels"] = call.cut(shifted)
        return self._original(logits, labels, *rest, **keywords)


def _shift_before(model: Any) -> None:
    function: Any = getattr(model, "loss_function", None)
    if getattr(function, "__name__", "") == "ForCausalLMLoss":
        model.loss_function = _Shifted(model, function)


def _mask(
    use_vmap: bool = False, local_size: int | None = None, config: Any = None, device: Any = None, **given: Any
) -> Any:
    """The mask that layers are given, also when they are recomputed: the call and the window that it stands for.

    Outside of a call it is the model's own, as `generate` makes it for a cache of one size.
    """
    call, own = current(), getattr(config and config._attn_implementation, "own", None)
    if call is None and own is not None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as known

        named = {"use_vmap": use_vmap, "config": config, "device": device} | given
        named |= {} if local_size is None else {"local_size": local_size}
        return known[own](**named) if own in known else None
    if use_vmap:
        raise ValueError("the model makes a mask by a function of its own, of places that shared sequences do not have")
    chunk = getattr(config, "attention_chunk_size", None)
    made = torch.empty(0, device=device)
    made.axonn_call = call  # type: ignore[attr-defined]
    made.axonn_window = local_size  # type: ignore[attr-defined]
    made.axonn_chunked = local_size is not None and local_size == chunk != getattr(config, "sliding_window", None)  # type: ignore[attr-defined]
    return made


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function of HF's registry: (batch, heads, tokens, head) in, (batch, tokens, heads, head) out."""
    call: Any = getattr(attention_mask, "axonn_call", None) or current() or module.axonn_sequences.now
    if call is None or position_bias is not None or key.shape[2] != call.share:
        what = "a bias by position" if position_bias is not None else "keys that are no share of its tokens"
        raise ValueError(f"{type(module).__name__} attends with {what}, which cannot be shared along a sequence")
    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    window = getattr(attention_mask, "axonn_window", None) or sliding_window
    if window is not None and window >= call.tokens:
        window = None
    elif getattr(attention_mask, "axonn_chunked", False):
        raise ValueError(
            f"{type(module).__name__} attends by chunks of {window} tokens, which shared sequences do not know"
        )
    q, k, v = (plain(t) for t in (query, key, value))
    sight, documents = Sight(causal, window), call.seen(causal)
    seed = drawn_seed(query) if dropout else None
    made = attend(q, k, v, call.shared, sight, documents, scaling, softcap or 0.0, dropout, s_aux, seed)
    return split_as(made.transpose(1, 2).contiguous(), query), None
