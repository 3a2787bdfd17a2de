"""Seq2SeqTrainer, which generates when it evaluates: losses, generated tokens and labels of one process, also where sequences end apart."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import axonn_plugins
from axonn_tp import Grid, Mesh, parallelize
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks, same_on_all
from tests.matrix import thorough

axonn_plugins.activate()
pytest.importorskip("accelerate")
import transformers  # noqa: E402

from tests.huggingface.trainer_runs import PAD, WORDS, Sentences, forget, history, padded, quiet  # noqa: E402

GRIDS: dict[int, dict[str, tuple[dict[str, Any], int]]] = {
    2: {"gx": ({"gx": 2}, 1), "gz": ({"gz": 2}, 2)},
    4: {"xz": ({"gx": 2, "gz": 2}, 2)},
}
SOME = {"gx": ["smoothed"], "gz": ["greedy"], "one": ["greedy", "smoothed"]}
WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "smoothed": {"label_smoothing_factor": 0.1, "generation_num_beams": 2}}


def t5() -> nn.Module:
    """Its head is not that which reads words, so that it does not say one word only; sequences end soon or late."""
    torch.manual_seed(5)
    sizes = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 56, "num_layers": 1, "num_heads": 4}
    tokens = {"decoder_start_token_id": PAD, "pad_token_id": PAD, "eos_token_id": 1}
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, **tokens, dropout_rate=0.0, tie_word_embeddings=False)
    )
    with torch.no_grad():
        model.lm_head.weight[1] *= 2
        model.lm_head.weight[PAD] *= 0
    return model


def shifted(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """With what the decoder reads, as DataCollatorForSeq2Seq gives it."""
    batch = padded(samples)
    ended = torch.where(batch["labels"] % 3 == 0, 1, batch["labels"])
    batch["labels"] = torch.where(batch["labels"] < 0, batch["labels"], ended)
    read = nn.functional.pad(batch["labels"][:, :-1], (1, 0), value=PAD)
    return batch | {"decoder_input_ids": torch.where(read < 0, PAD, read)}


def counted(found: Any) -> dict[str, float]:
    """Sums of what is generated, and of labels, over all samples."""
    return {"tokens": float(numpy.asarray(found.predictions).sum()), "rows": float(len(found.label_ids))}


def tuned(grid: dict[str, Any] | None, readers: int, **more: Any) -> dict[str, Any]:
    """9 sentences are evaluated 2 at a time: of two readers the second has none of the last batch."""
    forget()
    arguments = transformers.Seq2SeqTrainingArguments(
        output_dir=same_on_all(tempfile.mkdtemp()),
        per_device_train_batch_size=8 // readers,
        per_device_eval_batch_size=2 // readers,
        predict_with_generate=True,
        generation_max_length=9,
        eval_strategy="epoch",
        num_train_epochs=1,
        learning_rate=1e-3,
        seed=5,
        **quiet(grid and {**grid, "plan": "auto"}),
        **more,
    )
    used = transformers.Seq2SeqTrainer(
        t5(), arguments, shifted, train_dataset=Sentences(30), eval_dataset=Sentences(9, 4), compute_metrics=counted
    )
    used.train()
    predicted = used.predict(used.eval_dataset, max_length=9)
    return {
        "history": history(used),
        "predicted": predicted.predictions.tolist(),
        "labels": predicted.label_ids.tolist(),
        "ends": (predicted.predictions[:, 1] == 1).tolist(),
    }


def every(grids: dict[str, tuple[dict[str, Any] | None, int]], all_pairs: bool) -> dict[str, Any]:
    return {
        f"{way}: {name}": attempt(partial(tuned, grid, readers, **WAYS[way]))
        for name, (grid, readers) in grids.items()
        for way in (WAYS if all_pairs else SOME[name])
    }


@pytest.mark.parametrize("all_pairs", [False, thorough(True)])
def test_evaluations_are_those_of_one_process(all_pairs: bool) -> None:
    wanted = run_ranks(every, 1, {"one": (None, 1)}, all_pairs)[0]
    for way in WAYS:
        ends = wanted[f"{way}: one"]["ends"]  # at once, or never
        assert len(ends) == 9 and ends[:2] == [False, True]
    for world, grids in GRIDS.items():
        if world == 4 and not all_pairs:
            continue
        for rank in run_ranks(every, world, grids, all_pairs):
            for name, found in rank.items():
                expected = wanted[f"{name.partition(':')[0]}: one"]
                assert not isinstance(found, str), (name, found)
                assert (found["predicted"], found["labels"]) == (expected["predicted"], expected["labels"]), name
                assert len(found["history"]) == len(expected["history"])
                for entry, other in zip(found["history"], expected["history"], strict=True):
                    assert entry == pytest.approx(other, rel=1e-5, abs=1e-6), name


def drawn(split: bool) -> list[list[int]]:
    """Words that are drawn in plain PyTorch on ranks of x, each seeded by its number, and once more behind draws of one alone."""
    model = t5().eval()
    if split:
        parallelize(model, Mesh(Grid(gx=2)), "auto")
    found, rank = [], dist.get_rank() if split else 0
    torch.manual_seed(7 + rank)
    for _ in range(2):
        found += model.generate(torch.arange(6)[None] + 2, do_sample=True, max_new_tokens=5).tolist()  # type: ignore[operator]
        if rank:
            torch.rand(3)
    return found


def test_ranks_of_other_seeds_draw_the_same_words() -> None:
    wanted = run_ranks(drawn, 1, False)[0]
    assert run_ranks(drawn, 2, True) == [wanted] * 2
