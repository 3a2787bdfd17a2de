"""Training goes on with other numbers of ranks: the same losses, every sample once, and ranks that no grid can use stand by."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from axonn_plugins.cluster.launch import launch
from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.deepspeed import elastic
from axonn_recipes.examples.elastic import train
from axonn_recipes.models.gpt import GPT, GPTConfig
from tests.deepspeed.training import deepspeed  # noqa: F401  ranks are forked from here

AUTO = {"gx": "auto", "gy": "auto", "gz": "auto", "plan": "auto", "tokens_per_sample": 32}


def configuration(batch: int, **sizes: Any) -> dict[str, Any]:
    return {
        "train_batch_size": batch,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "torch_adam": True}},
        "axonn": {"tensor_parallel": AUTO | sizes},
    }


def model() -> GPT:
    return GPT(GPTConfig(vocabulary=128, context=32, layers=1, heads=4, hidden=32))


def trained(folder: Path, config: Path, steps: int) -> list[float] | str:
    torch.set_num_threads(1)
    leaving: list[tuple] = []
    elastic.atexit.register = lambda *given: leaving.append(given)  # type: ignore[assignment]  forked ranks end without it
    words = ["--double", "--config", str(config), "--output", str(folder), "--save-every", "2", "--steps", str(steps)]
    try:
        return train.main(words)
    except SystemExit as end:
        return f"spare, {end.code}"
    finally:
        for function, *arguments in leaving:
            function(*arguments)


def test_runs_go_on_with_the_ranks_that_are_left(tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps(configuration(batch=4)))
    whole = launch(trained, 1, tmp_path / "whole", config, 7)[0]
    # No grid of three divides a batch of 4 and 4 heads.
    first = launch(trained, 3, tmp_path / "run", config, 4)
    assert first[2] == "spare, 0" and first[0] == first[1]
    second = launch(trained, 1, tmp_path / "run", config, 7)[0]
    assert first[0] + second == pytest.approx(whole, abs=1e-10)
    noted = [json.loads(line) for line in (tmp_path / "run" / "losses.jsonl").read_text().splitlines()]
    assert [(row["step"], row["grid"][3]) for row in noted] == [(1, 2), (2, 2), (3, 2), (4, 2), (5, 1), (6, 1), (7, 1)]
    assert {one.name for one in (tmp_path / "run" / "checkpoints").glob("step*")} == {"step000006", "step000007"}
    # A node that comes back when the others are done, too few for a grid.
    config.write_text(json.dumps(configuration(batch=4, gx=2)))
    assert trained(tmp_path / "run", config, 7) == []


@pytest.mark.parametrize("seed", [3, None])
def test_a_step_has_the_same_samples_on_any_grid(seed: int | None) -> None:
    samples, batch = 10, 6
    by_grid = []
    for readers, micro in ((1, 6), (1, 2), (2, 3), (3, 1), (6, 1)):
        steps = []
        for step in range(5):  # three epochs
            taken: Counter[int] = Counter()
            for reader in range(readers):
                engine = SimpleNamespace(
                    mesh=SimpleNamespace(rank=lambda axis, at=reader: at, size=lambda axis, of=readers: of),
                    train_batch_size=lambda: batch,
                    train_micro_batch_size_per_gpu=lambda of=micro: of,
                    gradient_accumulation_steps=lambda of=batch // readers // micro: of,
                    global_steps=step,
                )
                batches = elastic.Batches(engine, range(samples), seed)
                first = next(iter(batches))
                numbers = list(batches.numbers(step))
                assert first.tolist() == numbers[0] and all(len(one) == micro for one in numbers)
                taken.update(number for one in numbers for number in one)
            steps.append(taken)
        by_grid.append(steps)
    assert all(steps == by_grid[0] for steps in by_grid)
    total: Counter[int] = sum(by_grid[0], Counter())
    assert total == dict.fromkeys(range(samples), 3)


def test_the_most_ranks_that_a_grid_can_use() -> None:
    assert elastic.usable(configuration(24), model(), 4)[0] == 4
    assert elastic.usable(configuration(24, gx=2), model(), 3)[0] == 2
    ranks, why = elastic.usable(configuration(4), model(), 7)
    assert ranks == 4 and "7" in why
    with pytest.raises(ConfigError, match="none of 1 to 1 ranks can train with this configuration, for one because"):
        elastic.usable(configuration(24, gx=2), model(), 1)


def test_mistakes_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"elastic.join needs a configuration with axonn.tensor_parallel"):
        elastic.join({"train_batch_size": 4}, model())
    for size in (None, "auto"):
        with pytest.raises(ConfigError, match="give train_batch_size as a number"):
            elastic.join(configuration(4) | {"train_batch_size": size, "train_micro_batch_size_per_gpu": 2}, model())
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ConfigError, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started"):
        elastic.join(configuration(4), model())
