"""TRL's GRPOTrainer and RLOOTrainer: groups of completions, their rewards and advantages are one process's over readers of several ranks."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor

import axonn_plugins
from axonn_plugins.hosts.transformers.tokens import of_all_readers
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks

axonn_plugins.activate()
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
from tests.huggingface.trainer_runs import forget, llama, preferred, reported, tokenizer  # noqa: E402


def by_turns(probabilities: Tensor, num_samples: int) -> Tensor:
    """In the place of drawing: the rows of a pair, which are of one prompt, go on in the likeliest way and in the next, and some end."""
    likeliest = probabilities.topk(2).indices
    chosen = likeliest.gather(1, torch.arange(len(probabilities))[:, None] % 2)
    return chosen.where(chosen % 4 > 0, 59)


def prompts(number: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(3, 59, (2 + place % 3,), generator=generator).tolist() for place in range(number)]
    return datasets.Dataset.from_list([{"prompt": " ".join(map(str, words))} for words in drawn])


def rewards(prompts: list[str], completions: list[str], **more: Any) -> list[float]:
    return [
        float(sum(map(int, completion.split())) % 11 + len(prompt))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


# By name: the trainer, its configuration and what that holds.
TRAINERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "GRPO": (trl.GRPOTrainer, trl.GRPOConfig, {"gradient_accumulation_steps": 2}),
    "tokens": (
        trl.GRPOTrainer,
        trl.GRPOConfig,
        {"loss_type": "bnpo", "entropy_coef": 0.1, "top_entropy_quantile": 0.5},
    ),
    "RLOO": (trl.RLOOTrainer, trl.RLOOConfig, {"sync_ref_model": True, "ref_model_sync_steps": 2}),
}


def tuned(name: str, folder: str, grid: dict[str, Any] | None, readers: int) -> list[dict[str, float]]:
    forget()
    trainer, config, more = TRAINERS[name]
    settings = {"num_generations": 2, "max_completion_length": 4, **preferred(folder, 4, grid, readers)} | more
    used = trainer(
        model=transformers.LlamaForCausalLM.from_pretrained(f"{folder}/model"),  # read once more as the reference
        reward_funcs=rewards,
        args=config(**settings),
        train_dataset=prompts(12),
        eval_dataset=prompts(5),  # with 2 completions of each, readers have not as many of the last batch
        processing_class=tokenizer(),
    )
    with mock.patch("torch.multinomial", by_turns):
        used.train()
    return [
        {key: value for key, value in reported(entry).items() if key != "step_time"} for entry in used.state.log_history
    ]


def streamed(folder: str, grid: dict[str, Any], readers: int) -> str:
    """What a stream is told that readers do not divide."""
    forget()
    arguments = trl.GRPOConfig(num_generations=2, max_completion_length=4, **preferred(folder, 4, grid, readers))
    arguments.accelerator_config.dispatch_batches = False
    data = prompts(5).to_iterable_dataset()
    used = trl.GRPOTrainer(llama(), rewards, arguments, prompts(4), data, processing_class=tokenizer())
    return attempt(used.evaluate)


def every(folder: str, grid: dict[str, Any] | None, readers: int) -> dict[str, Any]:
    found = {name: attempt(partial(tuned, name, folder, grid, readers)) for name in TRAINERS}
    return found if grid is None else found | {"stream": streamed(folder, grid, readers)}


def test_a_reader_without_tokens_counts_none() -> None:
    """A least number of 1 is one of all readers' tokens: each had one where it had none."""
    plugin = SimpleNamespace(deepspeed_config={"axonn": {}})
    accelerator = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=plugin), num_processes=2, gather=lambda own: torch.stack([own, own + 7])
    )
    kind: Any = type("Trainer", (SimpleNamespace,), {"__module__": "trl.trainer.grpo_trainer"})
    mask, values = torch.zeros(2, 4, dtype=torch.long), torch.ones(())
    with of_all_readers(kind(accelerator=accelerator)):
        assert (values / mask.sum().clamp(min=1.0)).item() == pytest.approx(2 / 7)
        assert (values / mask.sum()).item() == pytest.approx(2 / 7)


@pytest.mark.thorough
def test_as_in_one_process(tmp_path: Any) -> None:
    llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (wanted,) = run_ranks(every, 1, str(tmp_path), None, 1)
    for found in run_ranks(every, 4, str(tmp_path), {"gx": 2, "gz": 2, "plan": "auto"}, 2):
        assert "a stream of prompts ends with 2 samples, where all readers together read 4" in found.pop("stream")
        for name, tried in found.items():
            expected = wanted[name]
            assert not isinstance(tried, str) and not isinstance(expected, str), (name, tried, expected)
            assert sum(entry.get("grad_norm", 0) > 0.01 for entry in expected) == len(expected) - 2 > 2
            for entry, other in zip(tried, expected, strict=True):
                assert entry == pytest.approx(other, rel=2e-4, abs=1e-5), name
