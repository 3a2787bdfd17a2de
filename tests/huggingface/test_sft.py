"""TRL's SFTTrainer, whose fused head reads the weight of a layer that is split."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import pytest
import torch

import axonn_plugins
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks, same_on_all
from tests.matrix import thorough

axonn_plugins.activate()
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
from tests.huggingface.trainer_runs import forget, history, llama, preferred, tokenizer  # noqa: E402

AXES = {"gx": 1, "gy": 1, "gz": 2, "sequence": 1}


def mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"packing": True, "packing_strategy": "wrapped"},
    {"packing": True},  # several rows in one, without padding
    {"padding_free": True, "max_length": None},
    {"loss_type": "dft", "average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
    {"compute_loss_func": mean},
)


def rows(number: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (number,), generator=generator).tolist()
    return datasets.Dataset.from_list(
        [{"input_ids": torch.randint(3, 59, (length,), generator=generator).tolist()} for length in lengths]
    )


def tuned(
    grid: dict[str, Any] | None, readers: int, compute_loss_func: Any = None, **more: Any
) -> list[dict[str, float]]:
    """The last batches, of 3 and 2 samples, leave the second of two readers without any. Weights are averaged meanwhile."""
    forget()
    folder = same_on_all(tempfile.mkdtemp())
    arguments = trl.SFTConfig(**preferred(folder, 8, grid, readers) | {"max_length": 12} | more)
    averaging = trl.BEMACallback(update_freq=2)
    used = trl.SFTTrainer(
        model=llama(),
        args=arguments,
        train_dataset=rows(27, 1),
        eval_dataset=rows(10, 2),
        processing_class=tokenizer(),
        compute_loss_func=compute_loss_func,
        callbacks=[averaging],
    )
    used.train()
    averaged: Any = averaging.running_model
    return [*history(used), {name: float(weight.square().sum()) for name, weight in averaged.named_parameters()}]


SOME = {"gz": [1, 2, 3, 4], "gx": [0], "gy": [5], "sequence": [0, 3]}
"""By axis, ways in every run, each once: those with rows of their own where each rank reads its own."""


def every(pairs: list[tuple[int, str | None]]) -> list[Any]:
    found = []
    for way, axis in pairs:
        grid = {"gz": {"sequence": 2}} if axis == "sequence" else {axis: 2}
        found.append(attempt(partial(tuned, axis and grid | {"plan": "auto"}, AXES[axis] if axis else 1, **WAYS[way])))
    return found


@pytest.mark.parametrize("all_pairs", [False, thorough(True)])
def test_losses_are_those_of_one_process(all_pairs: bool) -> None:
    wanted = run_ranks(every, 1, [(way, None) for way in range(len(WAYS))])[0]
    pairs = [(way, axis) for way in range(len(WAYS)) for axis in AXES if all_pairs or way in SOME[axis]]
    found = run_ranks(every, 2, pairs)[0]
    for tried, expected in zip(found, [wanted[way] for way, _ in pairs], strict=True):
        assert not isinstance(tried, str) and not isinstance(expected, str), (tried, expected)
        assert len(tried) == len(expected)
        for entry, other in zip(tried, expected, strict=True):
            # A reader pads its rows to the longest of its own.
            assert {**entry, "total_flos": 0} == pytest.approx({**other, "total_flos": 0}, rel=1e-5, abs=1e-6)
