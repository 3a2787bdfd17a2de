"""Attention over ranks that share a sequence, beside one process: values, gradients and bytes."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from axonn_plugins.observe.ledger import Ledger
from axonn_tp import Grid, Mesh
from axonn_tp.context.attention import Shared, attend
from axonn_tp.context.chunks import Chunks, Sight, blocks, cheaper, needed, read_by, sent
from tests.distributed import run_ranks

SIGHTS = (Sight(), Sight(False), Sight(window=1), Sight(window=3), Sight(window=9))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [1, 5, 16, 37])
def test_every_token_is_on_one_rank(tokens: int, ranks: int) -> None:
    chunks = Chunks(tokens, ranks)
    places = [place for rank in range(ranks) for place in chunks.places(rank)]
    assert sorted(places) == list(range(chunks.padded)) and chunks.padded >= tokens
    assert chunks.padded - tokens < 2 * ranks
    assert [places[at] for at in chunks.order()] == list(range(chunks.padded))
    assert all(chunk in chunks.of(chunks.owner(chunk)) for chunk in range(2 * ranks))


def covered(chunks: Chunks, rank: int, sight: Sight, documents: bool) -> Counter[tuple[int, int]]:
    """Pairs of places that blocks say a rank's queries see, by places."""
    found: Counter[tuple[int, int]] = Counter()
    places = chunks.places(rank)
    for block in blocks(chunks, rank, sight, documents):
        keys = [chunk * chunks.size + at for chunk in block.keys for at in range(chunks.size)]
        queries = places[slice(*block.rows)]
        for (q_at, q), (k_at, k) in itertools.product(enumerate(queries), enumerate(keys)):
            seen = {"whole": True, "causal": k_at <= q_at, "masked": sees(q, k, sight)}[block.how]
            found[q, k] += seen
    return +found


def sees(q: int, k: int, sight: Sight) -> bool:
    return not sight.causal or (k <= q and (sight.window is None or q - k < sight.window))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("documents", [False, True])
def test_blocks_cover_each_pair_once(sight: Sight, ranks: int, documents: bool) -> None:
    chunks = Chunks(4 * ranks, ranks)
    for rank in range(ranks):
        pairs = itertools.product(chunks.places(rank), range(chunks.padded))
        assert covered(chunks, rank, sight, documents) == Counter((q, k) for q, k in pairs if sees(q, k, sight))


def test_causal_work_is_the_same_on_all_ranks() -> None:
    chunks = Chunks(64, 4)
    assert len({sum(covered(chunks, rank, Sight(), False).values()) for rank in range(4)}) == 1


def test_a_window_needs_neighbours_alone() -> None:
    chunks = Chunks(160, 4)
    assert needed(chunks, 0, Sight()) == tuple(sorted(range(1, 7), key=lambda chunk: (chunks.owner(chunk), chunk)))
    assert needed(chunks, 1, Sight(window=4)) == (0, 5)
    assert [chunk for _, chunk in read_by(chunks, 3, Sight(window=4))] == [4]
    assert cheaper(chunks, Sight(window=4)) == "gather"
    assert sent(chunks, 1, Sight(window=4), "gather", 1) < sent(chunks, 1, Sight(window=4), "ring", 1) / 2


def given(tokens: int, head: int = 4, wide: int = 4) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((2, 4, tokens, head), (2, 2, tokens, head), (2, 2, tokens, wide), (2, 4, tokens, wide))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def serial(
    q: Tensor, k: Tensor, v: Tensor, sight: Sight, documents: Tensor | None, softcap: float, sink: Any
) -> Tensor:
    at = torch.arange(q.shape[-2])
    apart = at[:, None] - at
    seen = (apart >= 0) if sight.causal else torch.ones_like(apart, dtype=torch.bool)
    seen = seen & (apart < sight.window) if sight.window is not None else seen
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None])
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    if not softcap and sink is None:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.4)
    logits = q @ k.mT * 0.4
    logits = (softcap * torch.tanh(logits / softcap) if softcap else logits).masked_fill(~seen, -torch.inf)
    more = [] if sink is None else [sink.view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)]
    return torch.cat([logits, *more], -1).softmax(-1)[..., : logits.shape[-1]] @ v


CASES = [
    *((tokens, sight, False, {}) for tokens in (16, 37) for sight in SIGHTS),
    *((tokens, Sight(), True, {}) for tokens in (16, 21)),
    (24, Sight(False), True, {}),
    (24, Sight(window=5), True, {}),
    (19, Sight(), False, {"softcap": 2.0}),
    (19, Sight(), True, {"sink": True}),
    (16, Sight(), False, {"wide": 6}),
]


def on_ranks(ranks: int) -> None:
    mesh = Mesh(Grid(gz=ranks, sequence=ranks))
    ledger = Ledger(mesh.axis_names())
    for (tokens, sight, packed, more), how in itertools.product(CASES, ("gather", "ring")):
        q, k, v, grad = given(tokens, wide=more.get("wide", 4))
        chunks = Chunks(tokens, ranks)
        documents = (torch.arange(tokens) * 3 // tokens).expand(2, -1).clone() if packed else None
        sink = (
            torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) if "sink" in more else None
        )
        whole = [t.clone().requires_grad_() for t in (q, k, v, *([] if sink is None else [sink]))]
        expected = serial(
            *whole[:3], sight, documents, more.get("softcap", 0.0), whole[3] if sink is not None else None
        )
        expected.backward(grad)
        mine = torch.tensor(chunks.places(mesh.rank("sequence")))
        real = mine < tokens

        def share(t: Tensor, mine: Tensor = mine, chunks: Chunks = chunks, tokens: int = tokens) -> Tensor:
            return torch.nn.functional.pad(t, (0, 0, 0, chunks.padded - tokens))[:, :, mine]

        shares = [share(t).requires_grad_() for t in (q, k, v)]
        own_sink = None if sink is None else sink.clone().requires_grad_()
        if documents is not None or not sight.causal:
            of = torch.zeros(2, tokens, dtype=torch.int64) if documents is None else documents
            documents = torch.nn.functional.pad(of, (0, chunks.padded - tokens), value=-1)
        with ledger:
            start = len(ledger.entries)
            out = attend(
                *shares, Shared(mesh, chunks, how), sight, documents, 0.4, more.get("softcap", 0.0), sink=own_sink
            )
            middle = len(ledger.entries)
            out.backward(share(grad))
        where = f"{tokens} tokens, {sight}, {how}, {more}, {ranks} ranks"
        torch.testing.assert_close(out[:, :, real], expected[:, :, mine[real]], rtol=1e-10, atol=1e-10, msg=where)
        for got, of in zip(shares, whole, strict=False):
            torch.testing.assert_close(
                got.grad[:, :, real], of.grad[:, :, mine[real]], rtol=1e-10, atol=1e-10, msg=where
            )
        if own_sink is not None:
            torch.distributed.all_reduce(own_sink.grad)
            torch.testing.assert_close(own_sink.grad, whole[3].grad, rtol=1e-10, atol=1e-10, msg=where)
        width = 2 * 2 * (4 + v.shape[-1])
        for first, last, back in ((start, middle, False), (middle, len(ledger.entries), True)):
            found = sum(entry.collective.sent for entry in ledger.entries[first:last])
            assert found == sent(chunks, mesh.rank("sequence"), sight, how, width, back), where
            assert {entry.collective.axis for entry in ledger.entries[first:last]} <= {"sequence"}
        if how == "ring":
            held = [torch.nn.functional.pad(t, (0, 0, 0, chunks.padded - tokens)).requires_grad_() for t in (k, v)]
            before = len(ledger.entries)
            with ledger:
                query = share(q).requires_grad_()
                of_all = attend(
                    query, *held, Shared(mesh, chunks), sight, documents, 0.4, more.get("softcap", 0.0), sink=sink
                )
                of_all.backward(share(grad))
            assert len(ledger.entries) == before, where
            torch.testing.assert_close(
                of_all[:, :, real], expected[:, :, mine[real]], rtol=1e-10, atol=1e-10, msg=where
            )
            torch.testing.assert_close(query.grad, shares[0].grad, rtol=1e-10, atol=1e-10, msg=where)
            for got, of in zip(held, whole[1:3], strict=True):
                torch.distributed.all_reduce(got.grad)
                torch.testing.assert_close(got.grad[:, :, :tokens], of.grad, rtol=1e-10, atol=1e-10, msg=where)
    assert not ledger.unknown
    mesh.destroy()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_as_one_process(ranks: int) -> None:
    run_ranks(on_ranks, ranks, ranks)
