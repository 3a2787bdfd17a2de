"""Packed sequences in attention in torch: each is computed as by itself, and what is packed in another way is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from axonn_plugins.hosts.megatron.packed import PackedAttention
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks
from tests.megatron import training
from tests.megatron.training import Case

LENGTHS, PADDED = (5, 1, 3), (6, 2, 4)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windowed": {"window_size": (1, 0)},
    "fused": {"masked_softmax_fusion": True},
}


def attention(kind: type[DotProductAttention], **settings: Any) -> DotProductAttention:
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2}
    return kind(TransformerConfig(**sizes, attention_dropout=0.0, **settings), 1, AttnMaskType.causal, "self")


def starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def rows(count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(count, heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    return query, key, value


def apart(settings: dict[str, Any], padded: tuple[int, ...]) -> float:
    """The largest difference from each sequence by itself in Megatron's own attention."""
    given, begins = rows(sum(padded)), starts(padded)
    there = None if padded == LENGTHS else begins
    packed = PackedSeqParams("thd", starts(LENGTHS), starts(LENGTHS), there, there)
    found = attention(PackedAttention, **settings)(*given, None, packed_seq_params=packed)
    alone, far = attention(DotProductAttention, **settings), [0.0]
    for first, length in zip(begins.tolist(), LENGTHS, strict=False):
        own = slice(first, first + length)
        wanted = alone(*(each[own].unsqueeze(1) for each in given), None)
        far.append((found[own] - wanted).abs().max().item())
    return max(far)


def compared() -> tuple[dict[str, float], list[str]]:
    training.on_cpu()
    wrong = [
        PackedSeqParams("sbhd", starts(LENGTHS), starts(LENGTHS)),
        PackedSeqParams("thd", starts(LENGTHS), starts((4, 2, 3))),
        PackedSeqParams("thd"),
    ]
    with training.parallel(Case()):
        core = attention(PackedAttention)
        said = [attempt(lambda p=packed: core(*rows(9), None, packed_seq_params=p)) for packed in wrong]  # type: ignore[misc]
        return {f"{name} {to}": apart(SETTINGS[name], to) for name in SETTINGS for to in (LENGTHS, PADDED)}, said


def test_each_sequence_is_computed_as_by_itself_and_other_packing_is_refused() -> None:
    ((found, said),) = run_ranks(compared, 1)
    assert len(found) == 2 * len(SETTINGS) and max(found.values()) < 1e-14
    assert len(said) == 3 and all("attention in torch takes 'thd'" in each for each in said)
