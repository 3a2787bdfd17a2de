"""The HF Trainer under the block and in one process: losses, steps, evaluations, files; and sizes that are "auto"."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import axonn_plugins
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks, same_on_all
from tests.matrix import thorough

axonn_plugins.activate()
pytest.importorskip("accelerate")
import transformers  # noqa: E402

from tests.huggingface.test_own_losses import NO_AUTO, Plain  # noqa: E402
from tests.huggingface.trainer_runs import (  # noqa: E402
    Case,
    Scarce,
    gpt2,
    history,
    llama,
    packed,
    reported,
    trained,
    trainer,
)

AUTO = {"gx": "auto", "gy": "auto", "gz": "auto", "plan": "auto"}
# Ranks: grids, and how many read different data; of "auto" the Trainer is told as if all did.
GRIDS: dict[int, dict[str, tuple[dict[str, Any], int]]] = {
    2: {
        "gx": ({"gx": 2, "plan": "auto"}, 1),
        "gz": ({"gz": 2, "plan": "auto"}, 2),
        "auto": (AUTO, 2),
    },
    4: {"xz": ({"gx": 2, "gz": 2, "plan": "auto"}, 2), "y and data": ({"gy": 2}, 2), "auto": (AUTO | {"gx": 2}, 4)},
}
# Neither 22 nor 14 samples are a multiple of 8 or of 4, nor are 10 of 4.
EVERYTHING = Case(
    batch=8,
    samples=22,
    arguments={
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "label_smoothing_factor": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "weight_decay": 0.1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_on_start": True,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "right",
        "greater_is_better": True,
        "save_total_limit": 2,
        "logging_first_step": True,
        "logging_steps": 2,
        "include_num_input_tokens_seen": "all",
    },
)
RESUMED = Case(
    model=llama,
    config={"zero_optimization": {"stage": 1}},
    arguments={"num_train_epochs": 1.5, "max_grad_norm": 0.5, "save_strategy": "steps", "save_steps": 3},
    samples=14,
)
PACKED = Case(
    model=llama,
    collate=packed,
    arguments={"num_train_epochs": 1, "train_sampling_strategy": "sequential", "dataloader_drop_last": True},
    samples=14,
)
COMPILED = {
    "compiled": Case(model=Plain, batch=8, arguments={"max_steps": 2}, config=NO_AUTO),
    "compiled-llama": Case(model=partial(llama, 1), batch=8, arguments={"max_steps": 2}),
}
PLAIN = Case(batch=8, arguments={"num_train_epochs": 1, "eval_strategy": "epoch"}, samples=14)


def scarce(readers: int) -> Any:
    """A model that has memory for 4 rows of all readers."""
    Scarce.rows = 4 // readers
    return gpt2(Scarce)


class Sorting(transformers.Trainer):
    """Decays matrices alone, which it tells by their dimensions; those of a model that has evaluated are split."""

    def create_optimizer(self, *_: Any) -> Any:
        if self.optimizer is None:
            every = [*self.model.parameters()]
            matrices, vectors = [p for p in every if p.dim() > 1], [p for p in every if p.dim() < 2]
            groups = [{"params": matrices, "weight_decay": 5.0}, {"params": vectors, "weight_decay": 0.0}]
            self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return self.optimizer


def evaluated_first(block: dict[str, Any] | None, readers: int) -> dict[str, Any]:
    used = trainer(PLAIN, block, readers, same_on_all(tempfile.mkdtemp()))
    used.__class__ = Sorting
    first, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(first):
        before = reported(used.evaluate())
    if block:
        used.model_preparation_time = 3600.0  # the first evaluation's alone
    with contextlib.redirect_stderr(said):
        used.train()
    assert all(entry["eval_runtime"] > 0 for entry in used.state.log_history if "eval_runtime" in entry)
    if block and not dist.get_rank():  # by the same plan, of which the model as it is now tells nothing
        assert "layers: split already" in said.getvalue() and " normal " in first.getvalue()
        assert "auto plan" not in said.getvalue()
    counts = used.model.num_parameters(), used.get_num_trainable_parameters()
    return {"history": history(used), "metrics": before, "parameters": counts}


def compiled(case: Case, block: dict[str, Any] | None, readers: int) -> dict[str, Any]:
    """Steps alone: what is evaluated would be compiled once more."""
    told = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if block else {}
    used = trainer(case, block, readers, same_on_all(tempfile.mkdtemp()), **told)
    used.train()
    return {"history": history(used), "metrics": {}}


def every(grids: dict[str, tuple[dict[str, Any], int]] | None, all_pairs: bool = False) -> dict[str, Any]:
    """Runs in one process, or on grids: all pairs of both, or each run on one grid and each grid with one run."""
    found: dict[str, Any] = {}
    for name, (grid, readers) in (grids or {"one": ({}, 1)}).items():
        block = {"tensor_parallel": grid} if grids else None
        if name == "auto" or (name == "y and data" and not all_pairs):
            found[f"plain: {name}"] = attempt(partial(trained, PLAIN, block, readers))
            continue
        if all_pairs or name in ("one", "xz"):
            found[f"everything: {name}"] = attempt(partial(trained, EVERYTHING, block, readers))
        if name not in ("one", "gz", "gx"):
            continue
        if all_pairs or name != "gx":
            found[f"first: {name}"] = attempt(partial(evaluated_first, block, readers))
        found[f"resumed: {name}"] = attempt(partial(trained, RESUMED, block, readers))
        if name != "gz":
            traced = block and {"tensor_parallel": grid | {"layout": "replicated", "compile": True}}
            for kind, case in COMPILED.items():
                if all_pairs or name == "one" or kind == "compiled":
                    found[f"{kind}: {name}"] = attempt(partial(compiled, case, traced, readers))
        if name == "gx":
            continue
        found[f"plain: {name}"] = attempt(partial(trained, PLAIN, block, readers))
        arguments = {"num_train_epochs": 1, "auto_find_batch_size": True}
        case = Case(model=partial(scarce, readers), batch=8, arguments=arguments, samples=14)
        found[f"found: {name}"] = attempt(partial(trained, case, block, readers))
        found[f"packed: {name}"] = attempt(partial(trained, PACKED, block, readers))
    if grids and "gz" in grids:
        for source, target in (("gx", "gz"), ("gz", "gx"), ("gz", "gz"))[: 3 if all_pairs else 2]:
            grid, readers = grids[target]
            stopped = f"{found[f'resumed: {source}']['folder']}/checkpoint-3"
            found[f"resumed: {source} {target}"] = attempt(
                partial(trained, RESUMED, {"tensor_parallel": grid}, readers, resume=stopped)
            )
    return found


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return run_ranks(every, 1, None)[0]


@pytest.fixture(scope="module", params=[2, thorough(4), *(thorough((number, True)) for number in GRIDS)], ids=str)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    number, all_pairs = request.param if isinstance(request.param, tuple) else (request.param, False)
    return run_ranks(every, number, GRIDS[number], all_pairs)


def close(found: Any, expected: Any, name: str) -> None:
    assert len(found) == len(expected), name
    for entry, other in zip(found, expected, strict=True):
        left_out = {"train_loss"} if name.count(" ") > 1 else set()  # of the steps since it resumed
        assert {k: v for k, v in entry.items() if k not in left_out} == pytest.approx(
            {k: v for k, v in other.items() if k not in left_out}, rel=1e-5, abs=1e-6
        ), name


def test_as_in_one_process(one: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name, found in rank.items():
            expected = one[f"{name.partition(':')[0]}: one"]
            assert not isinstance(found, str) and not isinstance(expected, str), (name, found, expected)
            close(found["history"], expected["history"], name)
            assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
            for key in ("steps", "checkpoints", "predicted", "parameters", "saved"):
                if key in found and not name.startswith("resumed") and found[key] != expected[key]:
                    raise AssertionError(f"{name}: {key} {found[key]} {expected[key]}")
            if "logits" in found:
                torch.testing.assert_close(
                    torch.tensor(found["logits"]), torch.tensor(expected["logits"]), rtol=0, atol=5e-6
                )


def test_a_step_is_that_of_all_ranks_whatever_is_chosen() -> None:
    """In a loop on Accelerate: batches, the steps of its scheduler, and what is said where it cannot be."""
    from tests.huggingface import test_readers as loops

    def each(config: bool, counted: int) -> dict[str, Any]:
        loops.forget()
        raw = loops.settings(AUTO) if config else None
        return attempt(partial(loops.looped, raw, counted) if config else partial(loops.looped, raw, 1, steps=counted))

    wanted = run_ranks(each, 1, False, 2)[0]
    for found in run_ranks(each, 2, True, 2):
        for key in ("losses", "rates"):
            assert torch.tensor(found[key]) == pytest.approx(torch.tensor(wanted[key]), rel=2e-6)


def test_a_loader_before_the_model() -> None:
    for said in run_ranks(too_early, 2):
        assert "was given a DataLoader before the model" in said


def too_early() -> str:
    from accelerate import Accelerator, DeepSpeedPlugin
    from torch.utils.data import DataLoader

    from tests.huggingface import test_readers as loops

    assert dist.is_initialized()
    loops.forget()
    plugin = DeepSpeedPlugin(hf_ds_config=loops.settings(AUTO))
    try:
        Accelerator(deepspeed_plugin=plugin).prepare(DataLoader([1, 2, 3]))
    except axonn_plugins.config.ConfigError as error:
        return str(error)
    return "no error"


def swept(grid: dict[str, Any] | None, readers: int) -> list[list[float]]:
    """What each trial of a search logs; by optuna's way through the Trainer, without optuna."""
    from transformers import integrations

    integrations.hp_params = lambda trial: trial.params
    sys.modules.setdefault("optuna", ModuleType("optuna"))
    case = Case(samples=12, arguments={"num_train_epochs": 1, "eval_strategy": "epoch"})
    used = trainer(case, grid and {"tensor_parallel": grid}, readers, same_on_all(tempfile.mkdtemp()))
    used.model_init, used.hp_name, used.hp_space = lambda: gpt2(), None, lambda trial: trial.params
    used.hp_search_backend = transformers.trainer_utils.HPSearchBackend.OPTUNA
    used.compute_objective = transformers.trainer_utils.default_compute_objective
    found = []
    for number, few in enumerate((4, 2, None)):
        batches = {} if few is None else {"per_device_train_batch_size": few // readers}
        used.train(trial=SimpleNamespace(number=number, params={"learning_rate": 1e-2 / (number + 1), **batches}))
        logged = [entry.get("loss", entry.get("eval_loss")) for entry in used.state.log_history]
        found.append([float(loss) for loss in logged if loss is not None])
    return found


def test_sizes_are_chosen_for_each_trial_of_a_search() -> None:
    """For as many samples in a step as the trial, or the one before, says, and not for those of a reader that was chosen before."""
    plan = {"transformer.h.*.mlp.c_fc": {"kind": "normal"}, "transformer.h.*.mlp.c_proj": {"kind": "transposed"}}
    wanted = run_ranks(attempt, 1, partial(swept, None, 1))[0]
    assert [len(losses) for losses in wanted] == [4, 7, 7]
    for found in run_ranks(attempt, 2, partial(swept, {"gx": 2, "gy": "auto", "gz": 1, "plan": plan}, 2)):
        for losses, one in zip(found, wanted, strict=True):
            assert losses == pytest.approx(one, rel=1e-5)
