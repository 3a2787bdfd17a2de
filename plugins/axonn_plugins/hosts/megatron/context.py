"""Context parallelism on a grid: sequences that Megatron's context-parallel ranks share, which lie within z and data.

Megatron cuts batches and rotary positions in the zigzag of `axonn_tp.context`. What else sees more than one token is here: attention, in
the place of Megatron's own core; the choices of routers; and means over tokens, which are those of whole sequences, also where a mask
leaves more tokens out on one rank than on another.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from megatron.core.models.gpt import gpt_model
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.originals import Originals
from axonn_plugins.hosts.megatron.packed import PackedAttention
from axonn_plugins.hosts.megatron.randomness import HEADS, HeadsDropout
from axonn_plugins.hosts.megatron.settings import TRAVEL
from axonn_tp.comm.collectives import all_gather, all_reduce, gather_to
from axonn_tp.context.attention import attend
from axonn_tp.context.chunks import Chunks, Sight
from axonn_tp.context.shared import AXIS, Shared


def install(originals: Originals, providers: list[type]) -> None:
    """Have models that are made from now on know of shared sequences."""
    for provider in providers:
        originals.wrap(provider, "core_attention", _of_shared_sequences)
    originals.wrap(TopKRouter, "routing", _of_whole_sequences)
    originals.wrap(schedules, "forward_step_calc_loss", _mean_over_sequences)
    for module in (gpt_model, multi_token_prediction):
        # Later versions compute the loss of predictions beside their layers.
        computes = module is gpt_model or hasattr(module, "process_mtp_loss")
        if computes and "roll_tensor" in vars(module):
            originals.wrap(module, "roll_tensor", _counting_whole_sequences)


def ranks() -> int:
    """Number of ranks that share a sequence."""
    return process_groups.mesh().size(AXIS)


def shared(tokens: int, how: str | None = None) -> Shared:
    """The sequences of which this rank has so many tokens."""
    return Shared(process_groups.mesh(), Chunks(tokens * ranks(), ranks()), how)


def _of_shared_sequences(original: Callable[[Any], type]) -> Callable[[Any], type]:
    @wraps(original)
    def core_attention(self: Any) -> type:
        if ranks() > 1:
            return ContextAttention
        chosen = original(self)
        return PackedAttention if chosen is DotProductAttention else chosen

    return core_attention


class ContextAttention(MegatronModule):
    """Megatron's core attention where sequences are shared: (share, batch, heads, head) → (share, batch, heads · head of values).

    Args:
        config: Megatron's.
        layer_number: from 1.
        attn_mask_type: must be causal.
        attention_type: must be ``"self"``.
        attention_dropout: as in the config when None.
        softmax_scale: times q·k; 1/√head when None.
        cp_comm_type: how keys and values travel, a key of `TRAVEL`; the cheaper way when None.
        others: groups, which are the mesh's, and widths, which the tensors have.

    Raises:
        ValueError: attention is of another kind.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        **others: Any,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type != AttnMaskType.causal or attention_type != "self":
            raise ValueError(
                f"attn_mask_type = {attn_mask_type.name} of {attention_type} attention: sequences are shared by causal self-attention alone; "
                "set context_parallel_size to 1"
            )
        if cp_comm_type is not None and cp_comm_type not in TRAVEL:
            raise ValueError(f"cp_comm_type = {cp_comm_type!r} is not known; use {', '.join(map(repr, TRAVEL))}")
        self.how = None if cp_comm_type is None else TRAVEL[cp_comm_type]
        self.softmax_scale = softmax_scale or 1 / math.sqrt(config.kv_channels)
        self.sight = Sight(window=_window(config, layer_number))
        self.attention_dropout = nn.Dropout(
            config.attention_dropout if attention_dropout is None else attention_dropout
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """This rank's queries on the keys and values of all.

        Args:
            query: (share, batch, heads, head).
            key: (share, batch, groups, head), or of all tokens in their order, (tokens, …).
            value: (share or tokens, batch, groups, head of values).
            attention_mask: this rank's rows, (batch or 1, 1, share, tokens), true where a query does not see a key: all after it, and those
                of other documents. Causal when None.
            attn_mask_type: not read.
            attention_bias: must be None.
            packed_seq_params: must be None.

        Raises:
            ValueError: an argument that shared sequences do not know.
        """
        if attention_bias is not None or packed_seq_params is not None:
            name = "attention_bias" if packed_seq_params is None else "packed_seq_params"
            raise ValueError(
                f"{name} is given to attention over {ranks()} ranks, which knows sequences cut as by get_batch_on_this_cp_rank; leave it out, or "
                "set context_parallel_size to 1"
            )
        whole = shared(len(query), self.how)
        # As Megatron's own, which makes another mask where there is a window.
        documents = None if self.sight.window is not None else _documents(attention_mask, whole)
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        sink = query.new_zeros(query.shape[2]) if self.config.softmax_type == "off-by-one" else None
        dropout = self.attention_dropout.p if self.training else 0.0
        seed = self._seed(query.device) if dropout else None
        made = attend(q, k, v, whole, self.sight, documents, self.softmax_scale, dropout=dropout, sink=sink, seed=seed)
        return made.permute(2, 0, 1, 3).flatten(2)

    def _seed(self, device: torch.device) -> int:
        """Another one on ranks that have other heads."""
        state = (HEADS,) if isinstance(self.attention_dropout, HeadsDropout) else ()
        with get_cuda_rng_tracker().fork(*state):
            return int(torch.randint(2**30, (), device=device))


def _window(config: Any, layer_number: int) -> int | None:
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    before, after = config.window_size
    # Less than 0 is as far as there are tokens; later ones are hidden all the same.
    if after > 0:
        raise ValueError(
            f"window_size = {tuple(config.window_size)} lets a token see the {after} after it; where sequences are shared it must be causal: "
            f"use ({before}, 0)"
        )
    return None if before < 0 else before + 1


_seen: Any = WeakIdKeyDictionary()
"""For each mask's memory and view of it the version of what was there, and what `_documents` has found."""


def _documents(mask: Tensor | None, whole: Shared) -> Tensor | None:
    """For each token of the whole sequences the first one that it sees; None where all see the first of all.

    All ranks of a sequence call it. It looks at a mask once, also where a recomputation gives another tensor of the same memory, and again
    where that was written meanwhile.

    Raises:
        ValueError: the mask is of another form.
    """
    if mask is None:
        return None
    known = _seen.setdefault(mask.untyped_storage(), {})
    view = mask.storage_offset(), mask.shape, mask.stride()
    version = None if mask.is_inference() else mask._version  # which inference tensors do not have
    if view not in known or known[view][0] != version:
        share, tokens = whole.chunks.share, whole.chunks.tokens
        if mask.shape[-2:] != (share, tokens):
            raise ValueError(
                f"attention_mask of shape {tuple(mask.shape)} is not of this rank's {share} rows of {tokens} tokens; cut it by "
                "get_batch_on_this_cp_rank, or give None for a causal one"
            )
        seen = ~mask[:, 0]
        first, rows = seen.int().argmax(-1), whole.places(mask.device)
        numbers = torch.arange(tokens, device=mask.device)
        wanted = (numbers >= first[..., None]) & (numbers <= rows[:, None])
        first = torch.where((seen == wanted).all(-1), first, -1)
        everyone = in_order(first.T.contiguous(), whole).T
        if (everyone < 0).any():
            raise ValueError(
                "attention_mask hides more than later tokens and other documents, which sequences that are shared do not know; leave "
                "it out, or set context_parallel_size to 1"
            )
        known[view] = version, everyone if everyone.any() else None
    return known[view][1]


def in_order(share: Tensor, whole: Shared) -> Tensor:
    """All tokens of a sequence, (tokens, …), from every rank's share; not differentiable."""
    return _in_order(all_gather(share, whole.mesh, AXIS, 0), whole)


def of_all(share: Tensor) -> Tensor:
    """The same, for a use that is another on each rank, so that gradients are summed."""
    whole = shared(len(share))
    return _in_order(gather_to(share, whole.mesh, AXIS, 0), whole)


def _in_order(laid: Tensor, whole: Shared) -> Tensor:
    return laid.index_select(0, torch.tensor(whole.chunks.order(), device=laid.device))


class _Same(torch.autograd.Function):
    """`in_order` for a use that is the same on all ranks of a sequence, so that each has the whole gradient of its own tokens."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, whole: Shared) -> Tensor:
        ctx.whole = whole
        return in_order(share, whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.whole.places(grad.device)), None


def _of_whole_sequences(original: Callable[..., Any]) -> Callable[..., Any]:
    """Balance, capacities and Sinkhorn's iterations are of all tokens of a microbatch, as on one rank: logits of all are here."""

    @wraps(original)
    def routing(self: Any, logits: Tensor, padding_mask: Tensor | None = None, *rest: Any, **named: Any) -> Any:
        if ranks() == 1:
            return original(self, logits, padding_mask, *rest, **named)
        whole = shared(len(logits))
        mask = None if padding_mask is None else in_order(padding_mask.to(torch.uint8), whole).bool()
        chosen = original(self, _Same.apply(logits, whole), mask, *rest, **named)
        places = whole.places(logits.device)
        return tuple(
            one.unflatten(0, (whole.chunks.tokens, -1)).index_select(0, places).flatten(0, 1) for one in chosen
        )

    return routing


def _mean_over_sequences(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron would take the mean of the ranks' means; this is that of all tokens of a microbatch."""
    signature = inspect.signature(original)

    @wraps(original)
    def calc_loss(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named).arguments
        loss_of, other = given["loss_func"], given["collect_non_loss_data"] or given["config"].calculate_per_token_loss
        if ranks() == 1 or loss_of is None or other:
            return original(*args, **named)

        def whole_loss(*outputs: Any, **keywords: Any) -> Any:
            made = loss_of(*outputs, **keywords)
            if not isinstance(made, tuple) or len(made) != 3:
                return made
            loss, tokens, report = made
            return loss * ranks(), all_reduce(tokens, process_groups.mesh(), AXIS), report

        given["loss_func"] = whole_loss
        return original(**given)

    return calc_loss


def _counting_whole_sequences(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same of multi-token prediction, whose mean Megatron takes over the sum that goes with a mask."""

    @wraps(original)
    def roll_tensor(*args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        rolled, total = original(*args, **named)
        return rolled, total if ranks() == 1 else all_reduce(total, process_groups.mesh(), AXIS) / ranks()

    return roll_tensor
