"""Models whose loss is a mean of their own rows, batches grouped by length, split or dispatched, optimizers of the script's own or with states before
the split: as in one process."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import axonn_plugins
from tests.deepspeed.scripts import one_sentence
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks, same_on_all
from tests.matrix import thorough

axonn_plugins.activate()
pytest.importorskip("accelerate")
import transformers  # noqa: E402

from tests.huggingface.trainer_runs import PAD, WORDS, Case, history, llama, padded, trainer  # noqa: E402

SIZES: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 56, "num_layers": 2, "num_heads": 4}
    sizes |= {"dropout_rate": 0.0, "decoder_start_token_id": PAD, "pad_token_id": PAD}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def classifier() -> nn.Module:
    torch.manual_seed(0)
    off: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **off, num_attention_heads=4))


def classes(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = padded(samples)
    return batch | {"labels": batch["input_ids"][:, 0] % 3}


def labelled_at_times(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Of some sentences no word is a target, and of a reader's rows none."""
    batch = padded(samples)
    return batch | {"labels": batch["labels"].where(batch["labels"][:, :1] % 4 != 1, -100)}


def by_layer(model: nn.Module) -> tuple[Any, Any]:
    """Rates of their own, which fall in a way of their own."""
    first = [p for name, p in model.named_parameters() if "layers.0" in name]
    others = [p for name, p in model.named_parameters() if "layers.0" not in name]
    optimizer = torch.optim.AdamW([{"params": first, "lr": 1e-3}, {"params": others, "lr": 5e-3}], weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)


EPOCH: dict[str, Any] = {"num_train_epochs": 1, "eval_strategy": "epoch", "prediction_loss_only": True}
# 14 samples are not a multiple of 4 nor of 8, 10 of 4; sentences have different lengths.
CASES = {
    "t5": Case(
        t5,
        labelled_at_times,
        EPOCH | {"gradient_accumulation_steps": 2, "logging_nan_inf_filter": False},
        batch=8,
    ),
    "classifier": Case(classifier, classes, EPOCH),
    "by length": Case(llama, arguments=EPOCH | {"train_sampling_strategy": "group_by_length"}),
    "drawn": Case(
        llama,
        arguments=EPOCH
        | {"neftune_noise_alpha": 5.0, "accelerator_config": {"use_seedable_sampler": False}, "num_train_epochs": 2},
    ),
    "flat and noisy": Case(
        llama,
        transformers.DataCollatorWithFlattening(),
        EPOCH | {"neftune_noise_alpha": 5.0, "remove_unused_columns": False},
    ),
    "split": Case(
        llama,
        arguments=EPOCH
        | {"accelerator_config": {"split_batches": True}}
        | {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4},
    ),
    "dispatched": Case(llama, arguments=EPOCH | {"accelerator_config": {"dispatch_batches": True}}),
    "given optimizer": Case(llama, arguments=EPOCH, optimizers=by_layer),
    "given, in shares": Case(llama, arguments=EPOCH, optimizers=by_layer, config={"zero_optimization": {"stage": 1}}),
    "adagrad": Case(llama, arguments=EPOCH | {"optim": "adagrad"}),
    "adagrad in shares": Case(
        llama, arguments=EPOCH | {"optim": "adagrad"}, config={"zero_optimization": {"stage": 1}}
    ),
}

SOME = ["t5", "classifier", "by length", "flat and noisy", "dispatched", "given, in shares"]


def counted_padding(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Padded to the longest of a reader, with labels there that count."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.stack([nn.functional.pad(one["input_ids"], (0, longest - len(one["input_ids"]))) for one in samples])
    mask = torch.tensor([[place < len(one["input_ids"]) for place in range(longest)] for one in samples])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def refused() -> str:
    told: str = attempt(partial(run, Case(llama, counted_padding, EPOCH), {"gz": 2}, 2))
    return told.splitlines()[0]


def run(case: Case, grid: dict[str, Any] | None, readers: int) -> list[dict[str, float]]:
    block = None if grid is None else {"tensor_parallel": grid | {"plan": "auto"}}
    case = replace(case, samples=14)  # the last batch is smaller, as it is of 30
    used = trainer(case, block, readers, same_on_all(tempfile.mkdtemp()))
    used.train()
    return history(used)


GRIDS: list[tuple[dict[str, Any] | None, int]] = [({"gz": 2}, 2), ({"gx": 2}, 1)]


def every(grids: dict[str, list[tuple[dict[str, Any] | None, int]]]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: [attempt(partial(run, CASES[name], grid, readers)) for grid, readers in of_name]
        for name, of_name in grids.items()
    }
    return found if torch.distributed.get_world_size() == 1 else found | {"padding": refused()}


@pytest.mark.parametrize(
    ("names", "with_one_reader"),
    [(SOME, {"flat and noisy", "given, in shares"}), thorough([*CASES], {*CASES})],
    ids=["some", "all"],
)
def test_as_in_one_process(names: list[str], with_one_reader: set[str]) -> None:
    wanted = run_ranks(every, 1, {name: [(None, 1)] for name in names})[0]
    for rank in run_ranks(every, 2, {name: GRIDS[: 1 + (name in with_one_reader)] for name in names}):
        told = rank.pop("padding")
        assert "labels of padding count as targets" in told and one_sentence(told)
        for name, grids in rank.items():
            assert len(grids) == 1 + (name in with_one_reader)
            for found in grids:
                assert not isinstance(found, str) and not isinstance(wanted[name][0], str), (name, found, wanted[name])
                assert len(found) == len(wanted[name][0])
                for entry, other in zip(found, wanted[name][0], strict=True):
                    assert entry == pytest.approx(other, rel=1e-5, abs=1e-6), name
