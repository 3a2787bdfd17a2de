"""The goldfish loss under the Trainer, which divides by the targets that are kept: a run on labels that were masked before."""

from __future__ import annotations

import inspect
import tempfile
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from axonn_plugins.goldfish import goldfish_labels
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks
from tests.huggingface.test_readers import Sentences, forget, gpt2, settings, transformers

GOLDFISH: dict[str, Any] = {"k": 2, "h": 2}
BY_PLACE = {"labels": list(inspect.signature(gpt2().forward).parameters).index("labels"), "shifts": True}
GRIDS: dict[str, tuple[dict[str, Any], int]] = {
    "gx": ({"tensor_parallel": {"gx": 2, "plan": "auto"}}, 1),
    "gz": ({"tensor_parallel": {"gz": 2, "plan": "auto"}}, 2),
    "data": ({}, 2),
}


class Masked(Sentences):
    def __getitem__(self, at: int) -> dict[str, Tensor]:
        sample = super().__getitem__(at)
        return sample | {"labels": goldfish_labels(sample["labels"][None], **GOLDFISH, shifts=True)[0]}


def trained(
    config: dict[str, Any] | None, readers: int, counts: bool = True, evaluation: bool = False
) -> tuple[list[float], list[float]]:
    """Losses, and those of an evaluation.

    Args:
        config: DeepSpeed's; None for one process on masked labels.
        readers: ranks that read data of their own.
        counts: the model takes the number of targets to divide by; else the last batch is of one reader, and nothing is evaluated,
            for in an evaluation the Trainer takes the mean of the readers' means.
        evaluation: leaves targets out as well, also before there is any training.
    """
    forget()
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=2 // readers,
        per_device_eval_batch_size=2 // readers,
        gradient_accumulation_steps=2,
        max_steps=3,
        learning_rate=1e-2,
        seed=5,
        report_to=[],
        save_strategy="no",
        eval_strategy="steps" if counts else "no",
        eval_steps=3,
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=config is None,
        deepspeed=config,
    )
    data = Masked if config is None else Sentences
    evaluated = (data if evaluation else Sentences)(4)
    model = gpt2()
    model.accepts_loss_kwargs = counts
    trainer = transformers.Trainer(model, arguments, train_dataset=data(16 if counts else 7), eval_dataset=evaluated)
    first = [trainer.evaluate()["eval_loss"]] if evaluation else []
    trainer.train()
    history = trainer.state.log_history
    return [e["loss"] for e in history if "loss" in e], first + [e["eval_loss"] for e in history if "eval_loss" in e]


HOW = {"counted": (True, False), "evaluation": (True, True), "not counted": (False, False)}
"""Arguments of `trained`."""


def every_grid() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for how, (counts, evaluation) in HOW.items():
        for name, (block, readers) in GRIDS.items():
            config = settings(None) | {
                "axonn": {"goldfish": GOLDFISH | {"evaluation": evaluation} | (BY_PLACE if not counts else {})} | block
            }
            found[f"{name}, {how}"] = attempt(partial(trained, config, readers, counts, evaluation))
    return found


def in_one() -> dict[str, Any]:
    return {how: trained(None, 1, *arguments) for how, arguments in HOW.items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(every_grid, 2)


@pytest.fixture(scope="module")
def one() -> Any:
    return run_ranks(in_one, 1)[0]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", GRIDS)
def test_losses_are_those_of_masked_labels(name: str, how: str, ranks: list[dict[str, Any]], one: Any) -> None:
    for rank in ranks:
        told = rank[f"{name}, {how}"]
        assert not isinstance(told, str), told
        assert len(told[0]) == 3 and bool(told[1]) == HOW[how][0]
        for found, wanted in zip(told, one[how], strict=True):
            assert torch.tensor(found) == pytest.approx(torch.tensor(wanted), rel=2e-6)
