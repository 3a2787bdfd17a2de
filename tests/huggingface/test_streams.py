"""Streams that every reader reads (``dispatch_batches = False``) end with their samples, as in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import IterableDataset

import axonn_plugins
from tests.deepspeed.scripts import one_sentence
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks, same_on_all
from tests.matrix import thorough

axonn_plugins.activate()
pytest.importorskip("accelerate")
datasets = pytest.importorskip("datasets")
from tests.huggingface.trainer_runs import Sentences, forget, history, llama, padded, quiet  # noqa: E402


class Stream(IterableDataset):
    """Of a length that nobody knows."""

    def __init__(self, number: int, seed: int) -> None:
        self.data = Sentences(number, seed)

    def __iter__(self) -> Iterator[Any]:
        return (self.data[at] for at in range(len(self.data)))


class Counted(Stream):
    """Of a length that it says."""

    def __len__(self) -> int:
        return len(self.data)


def files(number: int, seed: int) -> Any:
    """A stream of two files, which Accelerate would deal out."""
    rows = [{key: value.tolist() for key, value in row.items()} for row in Stream(number, seed)]
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2).with_format("torch")


KINDS: dict[str, Any] = {"unknown": Stream, "counted": Counted, "files": files}


def tuned(kind: str, grid: dict[str, Any] | None, readers: int, workers: int = 0) -> dict[str, Any]:
    """27 sentences 8 at a time, and 9 to evaluate 4 at a time: of two readers the second has none of the last batches."""
    forget()
    arguments = transformers.TrainingArguments(
        output_dir=same_on_all(tempfile.mkdtemp()),
        per_device_train_batch_size=8 // readers,
        per_device_eval_batch_size=4 // readers,
        accelerator_config={"dispatch_batches": False},
        dataloader_num_workers=workers,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=3,
        learning_rate=1e-2,
        seed=5,
        **quiet(grid and {**grid, "plan": "auto"}),
    )
    used = transformers.Trainer(
        llama(), arguments, padded, train_dataset=KINDS[kind](27, 3), eval_dataset=KINDS[kind](9, 4)
    )
    used.train()
    predicted = used.predict(KINDS[kind](9, 4))
    return {"history": history(used), "labels": predicted.label_ids.tolist(), "rows": len(predicted.predictions)}


GRIDS: list[tuple[dict[str, Any] | None, int]] = [({"gz": 2}, 2), ({"gx": 2}, 1)]


def every(grids: dict[str, list[tuple[dict[str, Any] | None, int]]]) -> dict[str, list[Any]]:
    found = {
        kind: [attempt(partial(tuned, kind, grid, readers)) for grid, readers in of_kind]
        for kind, of_kind in grids.items()
    }
    if torch.distributed.get_world_size() > 1:
        found["workers"] = [attempt(partial(tuned, "unknown", *GRIDS[0], workers=1))]
    return found


@pytest.mark.parametrize("with_one_reader", [{"files"}, thorough({*KINDS})], ids=len)
def test_losses_and_labels_are_those_of_one_process(with_one_reader: set[str]) -> None:
    wanted = run_ranks(every, 1, {kind: [(None, 1)] for kind in KINDS})[0]
    for rank in run_ranks(every, 2, {kind: GRIDS[: 1 + (kind in with_one_reader)] for kind in KINDS}):
        said = rank.pop("workers")[0].partition("\n")[0]
        assert "1 workers of a DataLoader that reads a stream" in said and one_sentence(said.partition(": ")[2])
        for kind, grids in rank.items():
            expected = wanted[kind][0]
            assert not isinstance(expected, str), expected
            assert len(grids) == 1 + (kind in with_one_reader)
            assert expected["rows"] == 9 and torch.tensor(expected["labels"]).shape == (9, 9)
            for found in grids:
                assert not isinstance(found, str), (kind, found)
                assert (found["labels"], found["rows"]) == (expected["labels"], 9), kind
                assert len(found["history"]) == len(expected["history"])
                for entry, other in zip(found["history"], expected["history"], strict=True):
                    assert entry == pytest.approx(other, rel=1e-5, abs=1e-6), kind
