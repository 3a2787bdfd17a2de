"""TRL's trainers on pairs and rewards: losses and metrics of a last batch that readers do not divide are one process's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import transformers

import axonn_plugins
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks

axonn_plugins.activate()
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")
from tests.huggingface.trainer_runs import forget, history, llama, preferred, tokenizer  # noqa: E402

SAMPLES, EVALUATED = 30, 11  # of batches of 8: two readers have 4 and 2 of the last, and 3 and none


def samples(number: int, seed: int, kind: str = "pairs") -> Any:
    """Of one length where losses are means over tokens, which readers of fewer tokens would have as plain DeepSpeed's do."""
    generator = torch.Generator().manual_seed(seed)

    def text(words: int) -> str:
        return " ".join(map(str, torch.randint(3, 58, (words,), generator=generator).tolist()))

    rows: list[dict[str, Any]] = []
    for place in range(number):
        more = 0 if kind == "alike" else place % 3
        prompt, answers = text(2 + more) + " ", (text(3 + more), text(3 + (more + 1) % 3 if more else 3))
        if kind == "single":
            rows.append({"prompt": prompt, "completion": answers[0], "label": bool(more)})
        else:
            rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    return datasets.Dataset.from_list(rows)


def scorer() -> Any:
    model, config = llama(), copy.copy(llama().config)
    config.num_labels, config.pad_token_id = 1, 60
    torch.manual_seed(0)
    scoring = transformers.LlamaForSequenceClassification(config)
    scoring.model = model.model
    return scoring


def other() -> Any:
    model = llama()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def adapter() -> Any:
    torch.manual_seed(1)
    return peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


class Paired(trl.KTOTrainer):
    """Samples are paired by fours for its KL estimates, whatever a rank's batch is."""

    def _prepare_dataset(self, dataset: Any, words: Any, args: Any, name: str) -> Any:
        args = copy.copy(args)
        args.per_device_train_batch_size = 4
        return super()._prepare_dataset(dataset, words, args, name)


orpo: Any = import_module("trl.experimental.orpo")

# By name: the trainer, its configuration, samples, the model and what else it is given.
TRAINERS: dict[str, tuple[Any, Any, str, Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "rewards": (trl.RewardTrainer, trl.RewardConfig, "pairs", scorer, dict),
    "DPO": (trl.DPOTrainer, trl.DPOConfig, "pairs", llama, lambda: {"ref_model": other()}),
    "DPO, LoRA": (trl.DPOTrainer, trl.DPOConfig, "pairs", llama, lambda: {"peft_config": adapter()}),
    "ORPO": (orpo.ORPOTrainer, orpo.ORPOConfig, "alike", llama, dict),
    "KTO": (Paired, trl.KTOConfig, "single", llama, lambda: {"ref_model": other()}),
}


def tuned(name: str, folder: str, grid: dict[str, Any] | None, readers: int) -> list[dict[str, float]]:
    forget()
    trainer, config, kind, model, more = TRAINERS[name]
    arguments = config(**preferred(folder, 8, grid, readers))
    arguments.remove_unused_columns &= name != "ORPO"
    used = trainer(
        model=model(),
        args=arguments,
        train_dataset=samples(SAMPLES, 1, kind),
        eval_dataset=samples(EVALUATED, 2, kind),
        processing_class=tokenizer("60", bos_token="59", eos_token="58"),
        **more(),
    )
    used.train()
    return [{key: value for key, value in entry.items() if key != "total_flos"} for entry in history(used)]


def every(folder: str, grid: dict[str, Any] | None, readers: int) -> dict[str, Any]:
    return {name: attempt(partial(tuned, name, folder, grid, readers)) for name in TRAINERS}


def test_as_in_one_process(tmp_path: Any) -> None:
    (wanted,) = run_ranks(every, 1, str(tmp_path), None, 1)
    for found in run_ranks(every, 4, str(tmp_path), {"gx": 2, "gz": 2, "plan": "auto"}, 2):
        for name, expected in wanted.items():
            tried = found[name]
            assert not isinstance(tried, str) and not isinstance(expected, str), (name, tried, expected)
            assert len(tried) == len(expected) == 6
            for entry, one in zip(tried, expected, strict=True):
                assert entry == pytest.approx(one, rel=2e-4, abs=1e-5), name
