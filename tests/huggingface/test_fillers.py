"""A row that a reader computes on because it has none of the last batch: whatever comes of it counts nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
from axonn_plugins.hosts.transformers import trainer_sums  # noqa: E402
from axonn_plugins.hosts.transformers.last_batch import Last, Nothing  # noqa: E402


@pytest.mark.parametrize("counted", [False, True])
def test_a_loss_over_no_token_is_not_spread(counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All labels of the row may be left out, as of a prompt that fills it; the mean over its tokens is then nan."""
    sent: list[Tensor] = []

    def reduce(loss: Tensor, how: str) -> Tensor:
        sent.append(loss)
        return loss

    accelerator = SimpleNamespace(reduce=reduce)
    trainer: Any = SimpleNamespace(
        accelerator=accelerator, _axonn_counted=counted, model=SimpleNamespace(training=True), model_wrapped=None
    )
    batch = {"labels": torch.full((2, 3), -100)}
    monkeypatch.setattr(trainer_sums, "last", lambda inputs: Last(rows=2, own=0, share=0.0))

    def predict(model: Any, inputs: Any) -> tuple[Tensor, None, Tensor]:
        assert isinstance(inputs, Nothing)
        trainer._axonn_counted = counted
        return torch.nn.functional.cross_entropy(torch.randn(3, 5), inputs["labels"][0]), None, inputs["labels"]

    loss, _, labels = trainer_sums._prediction_step(trainer, predict, None, batch)
    assert sent[0].item() == loss.item() == 0 and labels.shape == (2, 3)
    part = Last(rows=2, own=0, share=0.0).part_of(batch)
    step = trainer_sums._training_step(lambda self, model, inputs: predict(model, inputs)[0])
    assert step(trainer, None, part).item() == 0
