"""A row that a reader computes on because it has none of the last batch: whatever comes of it counts nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
from axonn_plugins.hosts.transformers import means, trainer_sums  # noqa: E402
from axonn_plugins.hosts.transformers.accelerate_patch import ask  # noqa: E402
from axonn_plugins.hosts.transformers.last_batch import Last, Nothing  # noqa: E402


def test_a_loss_over_no_token_is_not_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """All labels of the row may be left out, as of a prompt that fills it; the mean over its tokens is then nan."""
    sent: list[Tensor] = []

    def reduce(loss: Tensor, how: str) -> Tensor:
        sent.append(loss)
        return loss

    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config={"axonn": {}}))
    accelerator = SimpleNamespace(reduce=reduce, num_processes=2, state=state)
    trainer: Any = SimpleNamespace(
        accelerator=accelerator,
        args=SimpleNamespace(include_for_metrics=[]),
        **{"_axonn_counted": True, "model": nn.Linear(1, 1), "model_wrapped": None, "compute_loss_func": None},
    )
    logits = torch.randn(3, 5, requires_grad=True)

    def mean(model: Any, inputs: Any, **more: Any) -> Tensor:
        ask()  # as a script that counts processes itself
        return torch.nn.functional.cross_entropy(logits, inputs["labels"][0])

    def predict(model: Any, inputs: Any) -> tuple[Tensor, None, Tensor]:
        assert isinstance(inputs, Nothing)
        return means.in_one_process(trainer, mean, model, inputs), None, inputs["labels"]

    batch = {"labels": torch.full((2, 3), -100)}
    monkeypatch.setattr(trainer_sums, "last", lambda inputs: Last(rows=2, own=0, share=0.0))
    loss, _, labels = trainer_sums._prediction_step(trainer, predict, None, batch)
    assert sent[0].item() == loss.item() == 0 and labels.shape == (2, 3)
    trainer.compute_loss = mean
    step = trainer_sums._training_step(lambda self, model, inputs: self.compute_loss(model, inputs))
    found = step(trainer, None, Last(rows=2, own=0, share=0.0).part_of(batch))
    found.backward()
    assert found.item() == 0 and logits.grad is not None and not logits.grad.any() and trainer.compute_loss is mean
