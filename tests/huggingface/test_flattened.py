"""Batches without a row for each sample, and readers without samples of the last: losses, metrics and what is read are one process's."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from typing import Any

import numpy
import pytest
from torch.utils.data import DataLoader

import axonn_plugins
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks, same_on_all

axonn_plugins.activate()
pytest.importorskip("accelerate")
import transformers  # noqa: E402

from tests.huggingface.trainer_runs import Case, history, llama, padded, reported, trainer  # noqa: E402

EPOCH: dict[str, Any] = {"num_train_epochs": 1, "eval_strategy": "epoch", "remove_unused_columns": False}
UNEVEN = EPOCH | {"accelerator_config": {"even_batches": False}}
FLAT = transformers.DataCollatorWithFlattening()
# 14 samples by 8, 10 by 4: the last batch of an evaluation has none of the second reader, and none of three of four.
CASES = {
    "flat": Case(llama, FLAT, EPOCH | {"gradient_accumulation_steps": 2}, batch=8),
    "flat, losses": Case(llama, FLAT, EPOCH | {"prediction_loss_only": True}, batch=8),
    "rows": Case(llama, padded, EPOCH | {"include_for_metrics": ["inputs"]}, batch=8),
    "uneven": Case(llama, padded, UNEVEN, batch=8),
    "own loader": Case(llama, FLAT, EPOCH, batch=8),
}


class OwnLoader(transformers.Trainer):
    """As scripts make one that want another order."""

    def get_train_dataloader(self) -> Any:
        data: Any = self.train_dataset
        loader = DataLoader(data, self._train_batch_size, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


def words(given: Any) -> dict[str, float]:
    """Count words that were guessed, and, where inputs are given, those of one kind."""
    guessed, labels = numpy.asarray(given.predictions)[:, :-1], numpy.asarray(given.label_ids)[:, 1:]
    seen = {} if given.inputs is None else {"sevens": float((numpy.asarray(given.inputs) == 7).sum())}
    return {"guessed": float(guessed[labels != -100].sum()), "words": float((labels != -100).sum()), **seen}


def run(name: str, grid: dict[str, Any] | None, readers: int) -> dict[str, Any]:
    block = None if grid is None else {"tensor_parallel": grid | {"plan": "auto"}}
    used: Any = trainer(replace(CASES[name], samples=14), block, readers, same_on_all(tempfile.mkdtemp()))
    used.compute_metrics = None if "losses" in name else words
    if name == "own loader":
        used.__class__ = OwnLoader
    used.train()
    read = {"train": used.train_dataset.read[:], "eval": used.eval_dataset.read[:]}
    return {"history": history(used), "metrics": reported(used.predict(used.eval_dataset).metrics), **read}


def every(grids: list[tuple[dict[str, Any] | None, int]]) -> dict[str, list[Any]]:
    return {name: [attempt(partial(run, name, grid, readers)) for grid, readers in grids] for name in CASES}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_as_in_one_process(ranks: int) -> None:
    wanted = run_ranks(every, 1, [(None, 1)])[0]
    found = run_ranks(every, ranks, [({"gz": ranks}, ranks)])
    for name, (expected,) in wanted.items():
        assert not isinstance(expected, str), (name, expected)
        for rank in found:
            (tried,) = rank[name]
            assert not isinstance(tried, str), (name, tried)
            assert len(tried["history"]) == len(expected["history"])
            for entry, other in zip(tried["history"], expected["history"], strict=True):
                assert entry == pytest.approx(other, rel=1e-5, abs=1e-6), name
            assert tried["metrics"] == pytest.approx(expected["metrics"], rel=1e-5), name
        for part in ("train", "eval"):
            read = [one for rank in found for one in rank[name][0][part]]
            # A reader without a sample of the last batch computes on another, which counts nothing.
            assert sorted(set(read)) == sorted(expected[part]) and len(read) - len(expected[part]) < ranks, (name, part)
