"""A row that a reader computes on because it has none of the last batch: whatever comes of it counts nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import BatchSampler, Sampler

from tests.distributed import run_ranks

transformers = pytest.importorskip("transformers")
from axonn_plugins.hosts.transformers import means, trainer_sums  # noqa: E402
from axonn_plugins.hosts.transformers.asking import ask  # noqa: E402
from axonn_plugins.hosts.transformers.clipping import saying  # noqa: E402
from axonn_plugins.hosts.transformers.last_batch import Last, Nothing, counting, divides  # noqa: E402
from axonn_plugins.hosts.transformers.uneven import gathered  # noqa: E402
from axonn_plugins.hosts.transformers.unfilled import Unfilled  # noqa: E402


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
    monkeypatch.setattr(means, "counts_processes", lambda *given: True)
    monkeypatch.setattr(trainer_sums, "last", lambda inputs: Last(rows=2, own=0, share=0.0))
    loss, _, labels = trainer_sums._prediction_step(trainer, predict, None, batch)
    assert sent[0].item() == loss.item() == 0 and labels.shape == (2, 3)
    trainer.compute_loss = mean
    accelerator.backward = Tensor.backward
    nothing = Last(rows=2, own=0, share=0.0).part_of(batch)
    found = trainer_sums._training_step(trainer, lambda model, rows: trainer.compute_loss(model, rows), None, nothing)
    found.backward()
    assert found.item() == 0 and logits.grad is not None and not logits.grad.any() and trainer.compute_loss is mean


def test_losses_are_numbers_where_all_else_is_gathered_as_objects() -> None:
    """Objects of a batch are a list, and lists of batches of different sizes are cut to the shortest where they are joined."""

    def gather_for_metrics(value: str, use_gather_object: bool = False) -> tuple[str, bool]:
        return value, use_gather_object

    trainer: Any = SimpleNamespace(accelerator=SimpleNamespace(gather=None, gather_for_metrics=gather_for_metrics))
    trainer.gather_function = partial(gather_for_metrics, use_gather_object=True)
    gather = trainer_sums._gathering(trainer)
    trainer._axonn_loss = True
    assert [gather("loss"), gather("logits")] == [("loss", False), ("logits", True)]


def test_a_norm_that_deepspeed_does_not_clip_by_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    engine = SimpleNamespace(gradient_clipping=lambda: 0.0)
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config={"axonn": {}}))
    accelerator = SimpleNamespace(deepspeed_engine_wrapped=SimpleNamespace(engine=engine), state=state)
    clip = saying(lambda self, parameters, max_norm: 7.0)
    for norm in (0.0, float("inf"), 0.25, 0.25):
        assert clip(accelerator, [], norm) == 7.0
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "gradients are not clipped" in said and '"gradient_clipping": 0.25' in said


def of_readers(tensor: Tensor) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts) if tensor.dim() else torch.stack(parts)


class Drawn(Sampler):
    """An order by one of the generators that are nobody's own, as a script's own sampler has it."""

    def __init__(self, draw: Callable[[int], list[int]]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 14

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw(len(self)))


DRAWS: list[Callable[[int], list[int]]] = [
    lambda number: torch.randperm(number).tolist(),
    lambda number: random.sample(range(number), number),
    lambda number: numpy.random.permutation(number).tolist(),
]


def drawn(draw: Callable[[int], list[int]]) -> list[int]:
    """Samples that a reader reads whose generators have come apart from the others'."""
    reader = dist.get_rank()
    transformers.set_seed(reader)
    batches = [*Unfilled(BatchSampler(Drawn(draw), 2, drop_last=False), 3, reader)]
    return [sample for batch in batches for sample in batch][: None if reader == 0 else 4]


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
    return {
        "drawn": [drawn(draw) for draw in DRAWS],
        "rows": rows.tolist(),
        "means": [float(one) for one in means],
        "sum": float(mean.sum()),
        "none": none.shape,
    }


def test_what_readers_of_different_rows_gather() -> None:
    ranks = run_ranks(of_different_rows, 3)
    for way in range(len(DRAWS)):
        assert sorted(sample for found in ranks for sample in found["drawn"][way]) == [*range(14)]
    for found in ranks:
        assert found["rows"] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 0, 1] and found["none"] == (0, 2)
        assert found["means"] == pytest.approx([7 / 6, 7 / 6, 0.5]) and found["sum"] == 2
