"""TRL's trainers on pairs and rewards: losses and metrics of a last batch that readers do not divide are one process's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import axonn_plugins
import axonn_plugins.config
from axonn_plugins.hosts.transformers.tokens import refuse_heads
from tests.deepspeed.scripts import one_sentence
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks
from tests.matrix import thorough

axonn_plugins.activate()
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")
from tests.huggingface.trainer_runs import forget, history, llama, preferred, tokenizer  # noqa: E402

SAMPLES, EVALUATED = 22, 11  # of batches of 8: two readers have 4 and 2 of the last, and 3 and none


def samples(number: int, seed: int, kind: str = "pairs") -> Any:
    generator = torch.Generator().manual_seed(seed)

    def text(words: int) -> str:
        return " ".join(map(str, torch.randint(3, 58, (words,), generator=generator).tolist()))

    rows: list[dict[str, Any]] = []
    for place in range(number):
        more = place % 3
        prompt, answers = text(2 + more) + " ", (text(3 + more), text(3 + (more + 1) % 3 if more else 3))
        if kind == "single":
            rows.append({"prompt": prompt, "completion": answers[0], "label": bool(more)})
        elif kind == "chats":
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answers[0]}]
            rows.append({"messages": turns})
        else:
            rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1], "reference": answers[0][:8]})
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


def mixture() -> Any:
    """Its loss of the balance between experts is no mean over tokens."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    experts = {"num_local_experts": 4, "router_aux_loss_coef": 0.5}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, **experts))


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
cpo: Any = import_module("trl.experimental.cpo")
tpo: Any = import_module("trl.experimental.tpo")
gkd: Any = import_module("trl.experimental.gkd")

SYNCED = {"loss_type": ["sigmoid", "sft"], "sync_ref_model": True, "ref_model_sync_steps": 2}
# By name: the trainer, its configuration with its arguments, samples, the model and what else it is given.
TRAINERS: dict[str, tuple[Any, Callable[..., Any], str, Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "rewards": (trl.RewardTrainer, trl.RewardConfig, "pairs", scorer, dict),
    "DPO": (trl.DPOTrainer, partial(trl.DPOConfig, **SYNCED), "pairs", llama, lambda: {"ref_model": other()}),
    "DPO, LoRA": (
        trl.DPOTrainer,
        partial(trl.DPOConfig, precompute_ref_log_probs=True),
        "pairs",
        llama,
        lambda: {"peft_config": adapter()},
    ),
    "DPO, experts": (trl.DPOTrainer, trl.DPOConfig, "pairs", mixture, lambda: {"ref_model": mixture()}),
    "TPO": (tpo.TPOTrainer, tpo.TPOConfig, "pairs", llama, dict),
    "GKD": (
        gkd.GKDTrainer,
        partial(gkd.GKDConfig, lmbda=0.0, max_length=32),
        "chats",
        llama,
        lambda: {"teacher_model": other()},
    ),
    "ORPO": (orpo.ORPOTrainer, orpo.ORPOConfig, "pairs", llama, dict),
    "CPO": (cpo.CPOTrainer, cpo.CPOConfig, "pairs", llama, dict),
    "KTO": (Paired, trl.KTOConfig, "single", llama, lambda: {"ref_model": other()}),
    "KTO, LoRA": (Paired, trl.KTOConfig, "single", llama, lambda: {"peft_config": adapter()}),
}


def tuned(name: str, folder: str, grid: dict[str, Any] | None, readers: int) -> list[dict[str, float]]:
    forget()
    trainer, config, kind, model, more = TRAINERS[name]
    arguments = config(**preferred(folder, 8, grid, readers))
    arguments.remove_unused_columns &= name not in ("ORPO", "CPO")
    data = [datasets.load_from_disk(f"{folder}/{kind}{seed}") for seed in (1, 2)]  # from files, for what is precomputed
    words = tokenizer("60", bos_token="59", eos_token="58")
    words.chat_template = "{% for turn in messages %}{{ turn['content'] + ' ' }}{% endfor %}"
    used = trainer(
        model=model(),
        args=arguments,
        train_dataset=data[0],
        eval_dataset=data[1],
        processing_class=words,
        **more(),
    )
    used.train()
    # ORPO and CPO log the mean of their logits where rows are padded, too, to the longest of their reader.
    left_out = ("total_flos", *(f"{part}logits/{kind}" for part in ("", "eval_") for kind in ("chosen", "rejected")))
    left_out = left_out if name in ("ORPO", "CPO") else ("total_flos",)
    return [{key: value for key, value in entry.items() if key not in left_out} for entry in history(used)]


def refused(folder: str, grid: dict[str, Any], readers: int, **more: Any) -> str:
    forget()
    arguments = trl.DPOConfig(**preferred(folder, 8, grid, readers) | more)
    words = tokenizer("60", bos_token="59", eos_token="58")
    data = samples(8, 1)
    told: str = attempt(lambda: trl.DPOTrainer(llama(), None, arguments, None, data, data, words))
    return told.splitlines()[0]


def distilled(folder: str, grid: dict[str, Any], readers: int) -> str:
    forget()
    arguments = trl.DistillationConfig(**preferred(folder, 8, grid, readers))
    data = samples(8, 1)
    told: str = attempt(lambda: trl.DistillationTrainer(llama(), llama(), arguments, data, data, tokenizer()))
    return told.splitlines()[0]


def test_distillation_of_models_that_ted_splits() -> None:
    kind: Any = type("Trainer", (SimpleNamespace,), {"__module__": "trl.trainer.distillation_trainer"})

    def trainer(block: dict[str, Any]) -> Any:
        plugin = SimpleNamespace(deepspeed_config={"axonn": block})
        return kind(accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)))

    refuse_heads(trainer({"ted": {}, "tensor_parallel": None}))
    with pytest.raises(axonn_plugins.config.ConfigError, match=r"^ted.tensor = 2 with TRL's DistillationTrainer"):
        refuse_heads(trainer({"ted": {"tensor": 2}}))


BOTH, X, Z = {"gx": 2, "gz": 2, "plan": "auto"}, {"gx": 2, "plan": "auto"}, {"gz": 2, "plan": "auto"}


def every(folder: str, grids: dict[str, dict[str, Any]], ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, grid in grids.items():
        readers = 2 if ranks > 1 and "gz" in grid else 1
        found[name] = attempt(partial(tuned, name, folder, None if ranks == 1 else grid, readers))
    if ranks > 1:
        grid = BOTH if ranks == 4 else Z
        found["sorted"] = refused(folder, grid, 2, loss_type="aot")
        found["distilled"] = distilled(folder, grid, 2)
        found["memory"] = refused(folder, grid, 2, precompute_ref_log_probs=True)
    return found


@pytest.mark.parametrize(
    ("ranks", "grids"),
    [(2, {"rewards": Z, "DPO, experts": X, "ORPO": Z, "KTO, LoRA": Z}), thorough(4, dict.fromkeys(TRAINERS, BOTH))],
    ids=["two", "four"],
)
def test_as_in_one_process(tmp_path: Any, ranks: int, grids: dict[str, dict[str, Any]]) -> None:
    for kind in ("pairs", "single", "chats"):
        for number, seed in ((SAMPLES, 1), (EVALUATED, 2)):
            samples(number, seed, kind).save_to_disk(tmp_path / f"{kind}{seed}")
    (wanted,) = run_ranks(every, 1, str(tmp_path), grids, 1)
    for found in run_ranks(every, ranks, str(tmp_path), grids, ranks):
        assert 'loss_type = "aot" sorts the pairs of a batch' in found["sorted"] and one_sentence(found["sorted"])
        assert "gz = 2 with TRL's DistillationTrainer" in found["distilled"] and one_sentence(found["distilled"])
        assert "needs a dataset that is in files" in found["memory"] and one_sentence(found["memory"])
        for name, expected in wanted.items():
            tried = found[name]
            assert not isinstance(tried, str) and not isinstance(expected, str), (name, tried, expected)
            assert len(tried) == len(expected) == 5
            for entry, one in zip(tried, expected, strict=True):
                assert entry == pytest.approx(one, rel=5e-5, abs=3e-6), name
