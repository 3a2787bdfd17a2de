"""A row that a reader computes on because it has none of the last batch: whatever comes of it counts nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed import run_ranks

pytest.importorskip("transformers")
from axonn_plugins.hosts.transformers import means, trainer_sums  # noqa: E402
from axonn_plugins.hosts.transformers.accelerate_patch import ask  # noqa: E402
from axonn_plugins.hosts.transformers.last_batch import Last, Nothing, counting, divides  # noqa: E402
from axonn_plugins.hosts.transformers.uneven import gathered  # noqa: E402


def test_a_loss_over_no_token_is_not_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """All labels of the row may be left out, as of a prompt that fills it; the mean over its tokens is then nan."""
    sent: list[Tensor] = []

    def reduce(loss: Tensor, how: str) -> Tensor:
        sent.append(loss)
        return loss

    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config={"axonn": {}}))
    accelerator = SimpleNamespace(reduce=reduce, num_processes=2, state=state)

    class Trainer(SimpleNamespace):
        def compute_loss(self) -> None:
            """A script's."""

    trainer: Any = Trainer(
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


def of_readers(tensor: Tensor) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts) if tensor.dim() else torch.stack(parts)


def of_different_rows() -> dict[str, Any]:
    """Three readers, with 4, 2 and no rows of a batch of 12: the share of the second is that of a full batch."""
    reader = dist.get_rank()
    own = (4, 2, 0)[reader]
    part = Last(rows=4, own=own, share=own / 2).part_of({"x": torch.arange(4.0)})
    with counting(part):
        known = divides()
        rows = gathered(part["x"].repeat(2), of_readers)
        mean = gathered(part["x"].mean() if own else torch.tensor(torch.nan), of_readers)
        none = gathered(torch.zeros(0, 2), of_readers)
    assert divides() and not known
    means = [mean.mean(), mean.detach().float()[:2].mean(), mean[1:].mean()]
    return {"rows": rows.tolist(), "means": [float(one) for one in means], "sum": float(mean.sum()), "none": none.shape}


def test_what_readers_of_different_rows_gather() -> None:
    for found in run_ranks(of_different_rows, 3):
        assert found["rows"] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 0, 1] and found["none"] == (0, 2)
        assert found["means"] == pytest.approx([7 / 6, 7 / 6, 0.5]) and found["sum"] == 2
