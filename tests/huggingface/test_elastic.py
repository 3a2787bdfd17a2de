"""The Trainer goes on with the ranks that are left: the same losses as one rank that nobody disturbs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from axonn_plugins.cluster.launch import launch
from axonn_plugins.hosts.deepspeed import elastic
from tests.deepspeed.training import deepspeed  # noqa: F401  ranks are forked from here
from tests.huggingface.trainer_runs import AUTO, Sentences, forget, gpt2, padded

BATCH, STEPS = 4, 7
ROUNDING = 2e-6
"""transformers computes losses in float32; other samples would change them by more than 1e-2."""
OPEN = {"gx": "auto", "gy": 1, "gz": 1, "plan": "auto"}


def configuration() -> dict[str, Any]:
    batches = dict.fromkeys(AUTO, "auto") | {"train_batch_size": BATCH}
    return batches | {"zero_optimization": {"stage": 1}, "axonn": {"tensor_parallel": OPEN}}


def trained(folder: Path, steps: int) -> list[float] | str:
    """Losses of the run by step, with those of the starts before this one."""
    torch.set_num_threads(1)
    leaving: list[tuple] = []
    elastic.atexit.register = lambda *given: leaving.append(given)  # type: ignore[assignment]  forked ranks end without it
    forget()
    model = gpt2()
    try:
        config = elastic.join(configuration(), model)
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            deepspeed=config,
            max_steps=steps,
            save_steps=2,
            logging_steps=1,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_nan_inf_filter=False,
            report_to=[],
            disable_tqdm=True,
        )
        last = elastic.last_checkpoint(folder)
        used = transformers.Trainer(model, arguments, train_dataset=Sentences(30), data_collator=padded)
        used.train(resume_from_checkpoint=last)
        return [entry["loss"] for entry in used.state.log_history if "loss" in entry]
    except SystemExit as end:
        return f"spare, {end.code}"
    finally:
        for function, *rest in leaving:
            function(*rest)


def test_a_run_goes_on_with_the_ranks_that_are_left(tmp_path: Path) -> None:
    whole = launch(trained, 1, tmp_path / "whole", STEPS)[0]
    # No grid of three divides a batch of 4 and 4 heads; after step 4 a rank is lost.
    first = launch(trained, 3, tmp_path / "run", 4)
    assert first[2] == "spare, 0" and first[0] == first[1] == pytest.approx(whole[:4], abs=ROUNDING)
    (tmp_path / "run" / "checkpoint-6" / "global_step6.incomplete").mkdir(
        parents=True
    )  # and another one as it is saved
    assert launch(trained, 1, tmp_path / "run", STEPS)[0] == pytest.approx(whole, abs=ROUNDING)


def test_a_checkpoint_that_was_not_saved_to_its_end_is_passed_over(tmp_path: Path) -> None:
    """A rank was lost before the engine's files had their name, before the Trainer's state was written, or while it was."""
    assert elastic.last_checkpoint(tmp_path) is None and elastic.last_checkpoint(tmp_path / "none") is None
    for number, latest, state in (
        (8, "global_step8", "{}"),
        (10, "global_step10", "{}"),
        (12, "", "{}"),
        (14, "global_step14", ""),
        (16, "global_step16", '{"a'),
    ):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        for name, text in (("latest", latest), ("trainer_state.json", state)):
            if text:
                (folder / name).write_text(text)
    (tmp_path / "checkpoint-final").mkdir()
    assert elastic.last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
