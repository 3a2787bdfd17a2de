"""Megatron's own datasets with targets left out, in training alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from axonn_plugins.config import Goldfish
from axonn_plugins.goldfish import goldfish_mask

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset  # noqa: E402

from axonn_plugins.hosts.megatron import patch  # noqa: E402


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    original = GPTDataset.__getitem__
    yield
    patch.uninstall()
    assert GPTDataset.__getitem__ is original


def datasets(kind: Any = MockGPTDataset) -> list[Any]:
    """For training, validation and tests."""
    tokenizer = SimpleNamespace(eod=50, pad=51, vocab_size=52, unique_identifiers={"class": "none"})
    config = GPTDatasetConfig(
        random_seed=3,
        sequence_length=37,
        blend=None,
        split="2,1,1",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=True,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )
    return BlendedMegatronDatasetBuilder(kind, [6, 6, 6], lambda: True, config).build()


def test_samples_for_training_leave_targets_out() -> None:
    stock = [[one[at] for at in (0, 1, 5)] for one in datasets()]
    patch.install_components({"goldfish": Goldfish(k=2, h=5)})
    masked = [[one[at] for at in (0, 1, 5)] for one in datasets()]
    for number, (before, after) in enumerate(zip(stock, masked, strict=True)):
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one["labels"], other["labels"]) and torch.equal(one["tokens"], other["tokens"])
            dropped = goldfish_mask(one["labels"], 2, 5) if number == 0 else torch.zeros(37, dtype=torch.bool)
            assert torch.equal(other["loss_mask"], torch.where(dropped, 0.0, one["loss_mask"]))
            assert dropped.any() == (number == 0)


def test_evaluation_does_if_asked() -> None:
    patch.install_components({"goldfish": Goldfish(k=2, h=5, evaluation=True)})
    sample = datasets()[1][0]
    assert not sample["loss_mask"][goldfish_mask(sample["labels"], 2, 5)].any()


class Pairs(MockGPTDataset):
    """Makes samples of its own."""

    def __getitem__(self, at: int | None) -> dict[str, Any]:
        return {}


def test_other_datasets_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    patch.install_components({"goldfish": Goldfish(k=2)})
    with pytest.raises(SystemExit):
        datasets(Pairs)
    said = capsys.readouterr().err
    assert "masks the samples of Megatron's GPTDataset, and this script reads a Pairs; leave the flag out" in said
