"""The goldfish mask against one target at a time, its traps, and mistakes in the key."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_plugins.config import ConfigError, parse
from axonn_plugins.config.goldfish import Goldfish
from axonn_plugins.goldfish import Strategy, goldfish_labels, goldfish_mask
from axonn_plugins.hosts.common.divisor import Watch
from axonn_plugins.hosts.common.goldfish import LabelMask

SIZE = 1_000_003


def drawn(seed: int) -> Tensor:
    return torch.rand(SIZE, generator=torch.Generator().manual_seed(seed))


def one_at_a_time(row: list[int], k: int, h: int, strategy: str, table: Tensor) -> list[bool]:
    """The mask of a row, in integers of Python."""
    found = []
    for at in range(len(row)):
        key = at
        if strategy == "static":
            found.append(at % k == 0)
            continue
        if strategy != "seeded":
            if at < h - 1:
                found.append(False)
                continue
            key = 1 if strategy == "hash" else 0
            for token in row[at - h + 1 : at + 1]:
                key = key * token if strategy == "hash" else key * 6364136223846793005 + token + 1
            key = (key + 2**63) % 2**64 - 2**63  # as int64 wraps
        found.append(bool(table[key % SIZE] < 1 / k))
    return found


def published(targets: Tensor, k: int, h: int) -> Tensor:
    """As the paper's authors say it: table, seed, and the product of the window that ends with the target."""
    mask = torch.zeros_like(targets, dtype=torch.bool)
    keys = torch.stack([targets[:, at : at + h].prod(1) for at in range(targets.shape[1] - h + 1)], 1) % SIZE
    mask[:, h - 1 :] = drawn(2971215073)[keys] < 1 / k
    return mask


def tokens(rows: int, length: int, words: int = 128_256) -> Tensor:
    return torch.randint(words, (rows, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("strategy", get_args(Strategy))
@pytest.mark.parametrize(("k", "h", "seed"), [(2, 13, 2971215073), (3, 4, 7), (5, 1, 0)])
def test_each_target_is_that_of_the_rule(strategy: Any, k: int, h: int, seed: int) -> None:
    for labels in (tokens(3, 71), tokens(2, 37, 4), tokens(1, h), tokens(2, max(h - 1, 1))):
        mask = goldfish_mask(labels, k, h, strategy=strategy, seed=seed)
        assert mask.tolist() == [one_at_a_time(row, k, h, strategy, drawn(seed)) for row in labels.tolist()]


@pytest.mark.parametrize(("k", "h"), [(2, 13), (4, 4), (32, 13), (1, 1), (1, 50)])
def test_the_published_hash_bit_for_bit(k: int, h: int) -> None:
    labels = tokens(5, 131)
    labels[0, 20:] = -100
    labels[1, 5] = 0
    assert torch.equal(goldfish_mask(labels, k, h), published(labels, k, h))
    assert torch.equal(goldfish_mask(labels.int(), k, h), published(labels, k, h))


def test_a_passage_has_its_mask_wherever_it_stands() -> None:
    passage, before = tokens(1, 60), tokens(1, 17)
    for strategy in ("hash", "ordered_hash"):
        alone = goldfish_mask(passage, 2, strategy=strategy)
        later = goldfish_mask(torch.cat([before, passage], 1), 2, strategy=strategy)
        assert torch.equal(alone[:, 12:], later[:, 17 + 12 :]) and not alone[:, :12].any()


def test_the_traps_of_the_published_hash() -> None:
    labels = tokens(1, 200) + 1
    labels[0, 100] = 0
    backwards, around = labels.flip(1), slice(100, 113)
    assert goldfish_mask(labels, 4)[0, around].all() and not goldfish_mask(labels, 5)[0, around].any()
    assert torch.equal(goldfish_mask(labels, 2)[:, 12:], goldfish_mask(backwards, 2)[:, 12:].flip(1))
    ordered = goldfish_mask(labels, 4, strategy="ordered_hash")
    assert 0 < ordered[0, around].sum() < 13
    assert not torch.equal(ordered[:, 12:], goldfish_mask(backwards, 4, strategy="ordered_hash")[:, 12:].flip(1))
    few = tokens(40, 500, 3)
    assert goldfish_mask(few, 2, strategy="ordered_hash")[:, 12:].double().mean() == pytest.approx(0.5, abs=0.02)


def test_labels_that_the_model_shifts() -> None:
    labels = tokens(2, 40)
    labels[:, 30:] = -100
    found = goldfish_labels(labels, 2, 5, shifts=True)
    assert torch.equal(found[:, 1:], goldfish_labels(labels[:, 1:], 2, 5)) and torch.equal(found[:, 0], labels[:, 0])
    assert (found[:, 30:] == -100).all() and found.dtype == labels.dtype
    assert torch.equal(goldfish_labels(labels, 2, 5) == -100, goldfish_mask(labels, 2, 5) | (labels == -100))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"k": 0}, "k = 0 is not an integer of at least 1"),
        ({"h": 0}, "h = 0 is not an integer of at least 1"),
        ({"strategy": "hsh"}, "strategy = 'hsh' is not known"),
        ({"labels": torch.rand(2, 3)}, "labels are torch.float32 of shape \\(2, 3\\)"),
    ],
)
def test_what_gives_no_mask(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        goldfish_mask(**{"labels": tokens(1, 20), "k": 2} | given)


@pytest.mark.parametrize(
    ("given", "said"),
    {
        "missing": ({}, "axonn.goldfish.k is missing; add it to axonn.goldfish"),
        "k": ({"k": 1}, "axonn.goldfish.k = 1 is not an integer of at least 2; correct its value"),
        "h": ({"k": 2, "h": True}, "axonn.goldfish.h = true is not an integer of at least 1"),
        "k, too large": (
            {"k": 2**63},
            "axonn.goldfish.k = 9223372036854775808 is not an integer of at least 2 and below 2**63",
        ),
        "seed": (
            {"k": 2, "seed": 2**64},
            "axonn.goldfish.seed = 18446744073709551616 is not an integer of at least 0 and below",
        ),
        "strategy": ({"k": 2, "strategy": "hsh"}, 'axonn.goldfish.strategy = "hsh" is not known; use "hash"'),
        "labels": ({"k": 2, "labels": -1}, "axonn.goldfish.labels = -1 is not the name of an argument"),
        "unknown": ({"k": 2, "w": 3}, "axonn.goldfish.w is not a key"),
    }.values(),
)
def test_mistakes_in_the_key(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"goldfish": given})
    assert said in str(caught.value)


def test_the_key_has_the_defaults_of_the_function() -> None:
    defaults = inspect.signature(goldfish_mask).parameters
    block = Goldfish(k=2)
    assert [getattr(block, name) for name in ("h", "strategy", "seed")] == [
        defaults[name].default for name in ("h", "strategy", "seed")
    ]


class Takes(nn.Module):
    def forward(self, ids: Tensor, targets: Tensor, *rest: Tensor, **more: Tensor) -> None: ...


def test_labels_are_found_by_name_and_by_place() -> None:
    ids, labels = tokens(2, 30), tokens(2, 30) + 1
    masked = goldfish_labels(labels, 2, 5)
    for where, inputs, keywords in (
        ("targets", (ids, labels), {}),
        ("targets", (ids,), {"targets": labels}),
        (1, (ids,), {"targets": labels}),
        (1, (ids, labels), {}),
        (2, (ids, ids, labels), {}),
        ("more_targets", (ids, ids), {"more_targets": labels}),
    ):
        mask = LabelMask(Goldfish(k=2, h=5, labels=where), Takes())
        found, named = mask.arguments(inputs, keywords, training=True)
        for before, after in zip((*inputs, *keywords.values()), (*found, *named.values()), strict=True):
            assert torch.equal(after, masked if before is labels else ids)
        assert mask.arguments(inputs, keywords, training=False) == (inputs, keywords)
    evaluated = LabelMask(Goldfish(k=2, h=5, labels=1, evaluation=True), Takes())
    assert torch.equal(evaluated.arguments((ids, labels), {}, training=False)[0][1], masked)


def test_labels_of_a_pipelines_loss() -> None:
    ids, labels = tokens(2, 30), tokens(2, 30) + 1
    masked = goldfish_labels(labels, 2, 5)
    assert torch.equal(LabelMask(Goldfish(k=2, h=5)).several(labels), masked)
    found = LabelMask(Goldfish(k=2, h=5, labels=1)).several((ids, labels))
    assert torch.equal(found[0], ids) and torch.equal(found[1], masked)
    for block, given, said in (
        (Goldfish(k=2), (ids, labels), "the labels of the PipelineModule are 2 tensors; give the place"),
        (Goldfish(k=2, labels=2), (ids, labels), "axonn.goldfish.labels = 2, and the labels"),
        (
            Goldfish(k=2),
            labels.double(),
            "are torch.float64 of shape \\(2, 30\\), and the goldfish loss is of token ids",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            LabelMask(block).several(given)


SHAPE = 3, 7, 11
WEIGHTS = torch.rand(SHAPE[2], generator=torch.Generator().manual_seed(2))
WATCHED = {
    "cross-entropy": (lambda x, y, kept: F.cross_entropy(x, y), "targets"),
    "a module": (lambda x, y, kept: nn.CrossEntropyLoss()(x, y), "targets"),
    "likelihood": (lambda x, y, kept: F.nll_loss(x.log_softmax(-1), y), "targets"),
    "a sum": (lambda x, y, kept: F.cross_entropy(x, y, reduction="sum"), None),
    "a sum of each row": (lambda x, y, kept: F.cross_entropy(x, y, reduction="sum") / SHAPE[0], None),
    "all targets": (lambda x, y, kept: F.cross_entropy(x, y, reduction="none").mean(), None),
    "a count": (lambda x, y, kept: F.cross_entropy(x, y, reduction="sum") / (y != -100).sum(), "targets"),
    "a number": (lambda x, y, kept: F.cross_entropy(x, y, reduction="sum").div(kept), "targets"),
    "its inverse": (lambda x, y, kept: F.cross_entropy(x, y, reduction="sum") * (1 / kept), "targets"),
    "a mask": (
        lambda x, y, kept: (F.cross_entropy(x, y, reduction="none") * (y != -100)).sum() / (y != -100).float().sum(),
        "targets",
    ),
    "those kept": (lambda x, y, kept: F.cross_entropy(x, y, reduction="none")[y != -100].mean(), "targets"),
    "class weights": (lambda x, y, kept: F.cross_entropy(x, y, weight=WEIGHTS), "weights"),
    "class weights of a module": (lambda x, y, kept: nn.CrossEntropyLoss(WEIGHTS)(x, y), "weights"),
    "a sum of class weights": (
        lambda x, y, kept: F.cross_entropy(x, y, WEIGHTS, reduction="sum") / WEIGHTS[y[y != -100]].sum(),
        "weights",
    ),
    "weighed, a count": (lambda x, y, kept: F.cross_entropy(x, y, WEIGHTS, reduction="sum") / kept, "targets"),
    "unseen": (lambda x, y, kept: -x.log_softmax(-1)[y != -100].mean(), "targets"),
}
"""Losses, and what they are divided by: the number of kept targets, the sum of their class weights, or something else."""


@pytest.mark.parametrize("name", WATCHED)
def test_what_divides_a_loss_is_seen(name: str) -> None:
    loss, divides_by = WATCHED[name]
    logits, targets = torch.randn(SHAPE), tokens(SHAPE[0], SHAPE[1], SHAPE[2])
    targets[0, :4] = -100
    kept = int((targets != -100).sum())

    def count(weights: Tensor | None) -> Tensor:
        left = targets[targets != -100]
        return torch.tensor(kept) if weights is None else weights[left].sum()

    with Watch(count) as watch:
        loss(logits.flatten(0, 1), targets.flatten(), kept)
    assert watch.divides_by == divides_by
