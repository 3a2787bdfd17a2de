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
from axonn_tp.context.attention import attend
from axonn_tp.context.chunks import HOW, Chunks, Heads, Sight, blocks, cheaper, needed, read_by, sent
from axonn_tp.context.shared import Shared
from tests.distributed import run_ranks
from tests.matrix import thorough

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


def covered(chunks: Chunks, rank: int | None, sight: Sight, documents: bool) -> Counter[tuple[int, int]]:
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
    for rank in (None, *range(ranks)):
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
    heads = Heads(1, 8, 8, 1, 1)
    assert cheaper(chunks, Sight(window=4), heads) == "gather"
    assert sent(chunks, 1, Sight(window=4), "gather", heads) < sent(chunks, 1, Sight(window=4), "ring", heads) / 2


@pytest.mark.parametrize(
    ("ranks", "heads", "how"),
    [
        (8, Heads(2, 32, 32, 64, 64), "heads"),  # 4·7·32 / 8 a token there and back; gathering 5·7·32 / 2
        (8, Heads(2, 32, 8, 64, 64), "heads"),
        (4, Heads(2, 32, 2, 64, 64), "gather"),
        (2, Heads(1, 4, 2, 64, 64), "gather"),
        (8, Heads(2, 12, 12, 64, 64), "gather"),  # which do not divide
    ],
)
def test_heads_are_dealt_out_where_that_sends_least(ranks: int, heads: Heads, how: str) -> None:
    chunks = Chunks(64 * ranks, ranks)
    assert cheaper(chunks, Sight(), heads) == how


def test_heads_of_keys_are_repeated_until_every_rank_has_those_of_its_queries() -> None:
    assert [Heads(1, 12, keys, 1, 1).copies(4) for keys in (1, 2, 3, 4, 6, 12)] == [4, 2, 4, 1, 2, 1]
    assert sent(Chunks(16, 4), 1, Sight(), "heads", Heads(2, 12, 3, 5, 7)) == 3 * 4 * 2 * (3 + 3) * (5 + 7)


HEADS = {2: (4, 2), 3: (6, 2), 4: (4, 2)}
"""Heads of queries and of keys by ranks, of which 2 divide the latter, 3 neither divide nor are a multiple, 4 are one."""


def given(tokens: int, ranks: int, wide: int = 4) -> tuple[Tensor, ...]:
    generator, (heads, groups) = torch.Generator().manual_seed(tokens), HEADS[ranks]
    shapes = ((2, heads, tokens, 4), (2, groups, tokens, 4), (2, groups, tokens, wide), (2, heads, tokens, wide))
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
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
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


def on_ranks(ranks: int, turns: int) -> None:
    """Each case each way; where there are turns, each case one way."""
    mesh = Mesh(Grid(gz=ranks, sequence=ranks))
    ledger = Ledger(mesh.axis_names())
    ways = [(*case, how) for place, case in enumerate(CASES) for how in HOW[(place + ranks) % turns :: turns]]
    for tokens, sight, packed, more, how in ways:
        q, k, v, grad = given(tokens, ranks, more.get("wide", 4))
        chunks = Chunks(tokens, ranks)
        documents = (torch.arange(tokens) * 3 // tokens).expand(2, -1).clone() if packed else None
        sink = (
            torch.randn(q.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(3))
            if "sink" in more
            else None
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
        heads = Heads(2, *HEADS[ranks], 4, v.shape[-1])
        for first, last, back in ((start, middle, False), (middle, len(ledger.entries), True)):
            found = sum(entry.collective.sent for entry in ledger.entries[first:last])
            assert found == sent(chunks, mesh.rank("sequence"), sight, how, heads, back), where
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
    dropped(mesh)
    mesh.destroy()


def dropped(mesh: Mesh) -> None:
    """Backward drops what forward has dropped, and ranks that come with the same heads and the same seed do not drop alike."""
    ranks, tokens = mesh.size("sequence"), 12
    shared, generator = Chunks(tokens, ranks), torch.Generator().manual_seed(mesh.rank("sequence"))
    shapes = [(1, ranks * 2, shared.share, 4), *[(1, ranks, shared.share, 4)] * 2]
    for how in HOW:
        given = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
        moved = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

        def total(given: list[Tensor], how: str = how) -> Tensor:
            out = attend(*given, Shared(mesh, shared, how), dropout=0.5, seed=7)
            return (out * torch.arange(out.numel()).view_as(out).sin()).sum()

        total(given).backward()
        slope = torch.stack([(one.grad * by).sum() for one, by in zip(given, moved, strict=True)])
        torch.distributed.all_reduce(slope)
        with torch.no_grad():
            for number, by in enumerate(moved):
                two = [
                    [one + sign * 1e-5 * by if at == number else one for at, one in enumerate(given)]
                    for sign in (1, -1)
                ]
                numeric = (total(two[0]) - total(two[1])) / 2e-5
                torch.distributed.all_reduce(numeric)
                torch.testing.assert_close(slope[number], numeric, rtol=1e-6, atol=1e-8, msg=f"{how} {number}")
            same = torch.zeros(1, ranks * 2, shared.share, 4, dtype=torch.float64)
            out = attend(same, same, same + 1, Shared(mesh, shared, how), Sight(False), dropout=0.5, seed=7)
            everyone = [torch.empty_like(out) for _ in range(ranks)]
            torch.distributed.all_gather(everyone, out.contiguous())
        assert all((out[:, 0] != out[:, head]).any() for head in range(1, ranks * 2)), how
        assert all((out != other).any() for rank, other in enumerate(everyone) if rank != mesh.rank("sequence")), how


@pytest.mark.parametrize(("ranks", "turns"), [(3, 3), (4, 3), *map(thorough, (2, 3, 4), (1, 1, 1))])
def test_as_one_process(ranks: int, turns: int) -> None:
    run_ranks(on_ranks, ranks, ranks, turns)
