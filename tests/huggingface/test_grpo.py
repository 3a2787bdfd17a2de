"""TRL's GRPOTrainer: groups of completions, their rewards and advantages are one process's over readers of several ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import axonn_plugins
from tests.distributed import run_ranks

axonn_plugins.activate()
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
from tests.huggingface.trainer_runs import forget, llama, preferred, reported, tokenizer  # noqa: E402


def by_turns(probabilities: Tensor, num_samples: int) -> Tensor:
    """In the place of drawing: the rows of a pair, which are of one prompt, go on in the likeliest way and in the next."""
    likeliest = probabilities.topk(2).indices
    return likeliest.gather(1, torch.arange(len(probabilities))[:, None] % 2)


def prompts(number: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(3, 59, (2 + place % 3,), generator=generator).tolist() for place in range(number)]
    return datasets.Dataset.from_list([{"prompt": " ".join(map(str, words))} for words in drawn])


def rewards(prompts: list[str], completions: list[str], **more: Any) -> list[float]:
    return [
        float(sum(map(int, completion.split())) % 11 + len(prompt))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def tuned(folder: str, grid: dict[str, Any] | None, readers: int) -> list[dict[str, float]]:
    forget()
    arguments = trl.GRPOConfig(
        gradient_accumulation_steps=2,
        num_generations=2,
        max_completion_length=4,
        **preferred(folder, 4, grid, readers),
    )
    used = trl.GRPOTrainer(
        model=llama(),
        reward_funcs=rewards,
        args=arguments,
        train_dataset=prompts(12),
        eval_dataset=prompts(5),  # with 2 completions of each, readers have not as many of the last batch
        processing_class=tokenizer(),
    )
    with mock.patch("torch.multinomial", by_turns):
        used.train()
    return [
        {key: value for key, value in reported(entry).items() if key != "step_time"} for entry in used.state.log_history
    ]


def test_as_in_one_process(tmp_path: Any) -> None:
    (wanted,) = run_ranks(tuned, 1, str(tmp_path), None, 1)
    steps, evaluated = [entry for entry in wanted if "grad_norm" in entry], [*wanted[3]]
    assert len(wanted) == 5 and len(steps) == 3 and all(entry["grad_norm"] > 0.01 for entry in steps)
    for found in run_ranks(tuned, 4, str(tmp_path), {"gx": 2, "gz": 2, "plan": "auto"}, 2):
        assert len(found) == len(wanted)
        for entry, other in zip(found, wanted, strict=True):
            if "eval_loss" in other:  # filled up with the first samples, as plain DeepSpeed's
                assert [*entry] == evaluated
                continue
            assert entry == pytest.approx(other, rel=2e-4, abs=1e-5)
