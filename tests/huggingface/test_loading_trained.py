"""The Trainer and Accelerate under the block, with a model of `from_pretrained`: losses of one process, and what a rank reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import axonn_plugins

axonn_plugins.activate()
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from axonn_tp.grid.lazy import LazyTensor  # noqa: E402
from tests.axonn_tp.test_lazy import counted  # noqa: E402
from tests.distributed import run_ranks  # noqa: E402
from tests.huggingface.test_mixtures import mixture  # noqa: E402
from tests.huggingface.trainer_runs import Case, Sentences, forget, history, llama, padded, settings  # noqa: E402

BLOCKS: dict[str, tuple[dict[str, Any], int]] = {
    "gx": ({"tensor_parallel": {"gx": 2, "plan": "auto"}}, 1),
    "gz": ({"tensor_parallel": {"gz": 2, "plan": "auto"}}, 2),
    "gy, a new head": ({"tensor_parallel": {"gy": 2, "plan": "auto"}}, 1),
    "mixture, x": ({"tensor_parallel": {"gx": 2, "plan": "auto"}, "ted": {}}, 1),
    "mixture, z": ({"tensor_parallel": {"gz": 2, "plan": "auto"}, "ted": {"expert": 2}}, 2),
    "mixture, experts": ({"ted": {"expert": 2}}, 2),
    "whole, no experts": ({"ted": {"expert": "auto"}}, 2),
}


def part_of(name: str) -> str:
    """The folder of what a case loads."""
    return next((part for part in ("mixture", "head") if part in name), "whole")


def learned(folder: Path, name: str, block: dict[str, Any] | None, readers: int) -> dict[str, Any]:
    """As a script does it: arguments, then the model, then the Trainer."""
    forget()
    arguments = transformers.TrainingArguments(
        output_dir=f"{folder}/out",
        per_device_train_batch_size=4 // readers,
        max_steps=3,
        learning_rate=1e-2,
        seed=5,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=block is None,
        deepspeed=None if block is None else settings(Case(), block),
    )
    torch.manual_seed(1)
    with counted() as sizes:
        model = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/{part_of(name)}")
        at_once, lazy = len(sizes), sum(isinstance(p, LazyTensor) for p in model.parameters())
        trainer = transformers.Trainer(model, arguments, train_dataset=Sentences(30), data_collator=padded)
        trainer.train()
    shards = sum(parameter.nbytes for parameter in model.parameters())
    return {"history": history(trainer), "at once": at_once, "lazy": lazy, "read": sum(sizes), "shards": shards}


def by_accelerate(folder: Path) -> list[int]:
    """Count parameters that are unread once the configuration is known, and under one without the block."""
    from accelerate import Accelerator, DeepSpeedPlugin

    found = []
    for block in ({"tensor_parallel": {"gx": 2, "plan": "auto"}}, None):
        forget()
        raw = settings(Case(), {}) | {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
        raw = {key: value for key, value in raw.items() if key != "axonn"} | ({} if block is None else {"axonn": block})
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=raw), cpu=block is None)
        model = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/whole")
        found.append(sum(isinstance(parameter, LazyTensor) for parameter in model.parameters()))
        del accelerator
    return found


def all_of_it(folder: Path) -> dict[str, Any]:
    if dist.get_world_size() == 1:
        of_files = {part: learned(folder, part, None, 1) for part in {*map(part_of, BLOCKS)}}
        return {name: of_files[part_of(name)] for name in BLOCKS}
    found: dict[str, Any] = {name: learned(folder, name, block, readers) for name, (block, readers) in BLOCKS.items()}
    return found | {"accelerate": by_accelerate(folder)}


def test_a_rank_reads_its_shards_and_trains_as_one_process(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "whole")
    state = model.state_dict()
    number = len(state)
    del state["lm_head.weight"]
    model.save_pretrained(tmp_path / "head", state_dict=state)
    experts = mixture()
    experts.save_pretrained(tmp_path / "mixture")
    (serial,) = run_ranks(all_of_it, 1, tmp_path)
    for rank in run_ranks(all_of_it, 2, tmp_path):
        for name in BLOCKS:
            found, expected = rank[name], serial[name]
            assert expected["lazy"] == 0 and found["at once"] == 0
            made = experts if "mixture" in name else model
            assert found["lazy"] == len(made.state_dict()) - ("a new head" in name), name
            losses = [entry["loss"] for entry in found["history"] if "loss" in entry]
            assert len(losses) == 3
            assert losses == pytest.approx([e["loss"] for e in expected["history"] if "loss" in e], rel=1e-5), name
            whole = sum(parameter.nbytes for parameter in made.parameters())
            if name in ("gx", "gz") or "mixture" in name:  # of what is in the file
                dense = 0.9 if name == "mixture, experts" else 0.65
                assert found["read"] <= found["shards"] < dense * whole, (name, found["read"], found["shards"], whole)
        assert rank["accelerate"] == [number, 0]
