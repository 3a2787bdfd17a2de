"""Packed sequences (`PackedSeqParams` in the format ``thd``) in Megatron's own attention in torch, which knows none without Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor


class PackedAttention(DotProductAttention):
    """Megatron's attention, also on sequences laid end to end in one row: no token sees another sequence's."""

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
        """Megatron's own where nothing is packed.

        Args:
            query: (tokens, batch, heads, head), of packed sequences without batch.
            key: as query.
            value: as query.
            attention_mask: not read where sequences are packed, which are causal each.
            attn_mask_type: as Megatron's.
            attention_bias: as Megatron's.
            packed_seq_params: where each sequence begins.

        Raises:
            ValueError: sequences are packed in another way.
        """
        if packed_seq_params is None:
            return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias)
        mask = self._unseen(packed_seq_params, len(query), query.device)
        with self._by_mask_alone():
            return super().forward(
                *(each.unsqueeze(1) for each in (query, key, value)), mask, attn_mask_type, attention_bias
            )

    def _unseen(self, packed: Any, tokens: int, device: torch.device) -> Tensor:
        """(1, 1, tokens, tokens), true where a query does not see a key."""
        starts = [each if padded is None else padded for each, padded in (
            (packed.cu_seqlens_q, packed.cu_seqlens_q_padded), (packed.cu_seqlens_kv, packed.cu_seqlens_kv_padded)
        )]  # fmt: skip
        if packed.qkv_format != "thd" or any(each is None for each in starts) or not torch.equal(*starts):
            raise ValueError(
                f"packed_seq_params of the format {packed.qkv_format!r}: attention in torch takes 'thd' whose cu_seqlens_q and cu_seqlens_kv are "
                "the same; use --transformer-impl transformer_engine for others"
            )
        places, window = torch.arange(tokens, device=device), self.scale_mask_softmax.window_size
        sequence = torch.searchsorted(starts[0].reshape(-1)[1:].to(device), places, right=True)
        unseen = (sequence[:, None] != sequence) | (places[:, None] < places)
        if window is not None:
            unseen = unseen | (places[:, None] - window[0] > places)
        return unseen[None, None]

    @contextmanager
    def _by_mask_alone(self) -> Iterator[None]:
        """Fused kernels of causal masks read no other mask, and a window takes the place of any."""
        softmax = self.scale_mask_softmax
        fused, window = softmax.scaled_masked_softmax_fusion, softmax.window_size
        softmax.scaled_masked_softmax_fusion, softmax.window_size = False, None
        try:
            yield
        finally:
            softmax.scaled_masked_softmax_fusion, softmax.window_size = fused, window
