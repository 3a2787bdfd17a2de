"""Sizes that the block leaves to the planner: the same run as with those sizes written down, the same choice on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  ranks are forked from here
import pytest
import torch
from torch import nn

from axonn_plugins.config import ConfigError, parse
from axonn_plugins.hosts.deepspeed.tensor import auto_sizes
from axonn_plugins.hosts.deepspeed.tensor.config import stand_in
from axonn_plugins.planner import machine
from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_tp import Grid, Options
from tests.deepspeed.test_engine import gpt, ids
from tests.deepspeed.training import Case, attempt, parallel, start, train
from tests.distributed import run_ranks

AUTO = {"gx": "auto", "gy": "auto", "gz": "auto", "plan": "auto", "machine": "perlmutter"}
BATCHES: dict[str, dict[str, Any]] = {
    # The product of all three leaves two ranks that read different data.
    "all three": {"train_batch_size": 8},
    "one given": {"train_batch_size": 8, "axonn": {"tensor_parallel": AUTO | {"gx": 2}}},
}


def block(**keys: Any) -> Any:
    return parse({"tensor_parallel": AUTO | keys}).tensor_parallel


def chosen_and_written() -> dict[str, Any]:
    found = {}
    for name, extra in BATCHES.items():
        engine = start(case := Case(gpt, ids, plan="auto", extra={"axonn": {"tensor_parallel": AUTO}} | extra))
        grid = engine.mesh.grid
        got = train(engine, case.batches())
        read = engine.train_batch_size(), engine.config["axonn"]["tensor_parallel"]["gx"]
        engine.destroy()
        fixed = Case(gpt, ids, (grid.gx, grid.gy, grid.gz), "auto", extra={"train_batch_size": 8})
        found[name] = (grid, read, got, parallel(fixed))
    found["mistake"] = attempt(start, Case(gpt, ids, extra={"axonn": {"tensor_parallel": AUTO | {"gy": 3}}, "train_batch_size": 8}))  # fmt: skip
    return found


def test_trains_what_the_written_sizes_train() -> None:
    ranks = run_ranks(chosen_and_written, 4)
    for name in BATCHES:
        grids = {found[name][0] for found in ranks}
        assert len(grids) == 1 and next(iter(grids)).batch == 2 and next(iter(grids)).world == 4
        for found in ranks:
            grid, read, got, written = found[name]
            assert read == (8, grid.gx)
            assert got["losses"] == written["losses"] and got["norms"] == written["norms"]
    assert ranks[0]["one given"][0].gx == 2
    assert all(
        "ConfigError: rank 0: axonn.tensor_parallel: no grid of 4 ranks, gy = 3" in one["mistake"] for one in ranks
    )


def test_a_large_model_on_many_ranks() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(50304, 2048, 2, 16, 2048))
    raw = {"train_batch_size": 512, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    found = auto_sizes.choose_sizes(model, block(), raw, 64, {}, Options())
    assert found.sizes["gx"] * found.sizes["gy"] * found.sizes["gz"] <= 64
    assert "planner, on perlmutter: gx=" in found.why and "; next gx=" in found.why and '"gz": ' in found.why
    # 8 samples leave only grids with at most 8 ranks that read different data.
    few = auto_sizes.choose_sizes(model, block(), raw | {"train_batch_size": 8}, 64, {}, Options())
    assert few.sizes["gx"] * few.sizes["gy"] >= 8


def test_one_word_for_all_four() -> None:
    by_word = parse({"tensor_parallel": {"plan": "planner", "gy": 2}}).tensor_parallel
    assert by_word == parse({"tensor_parallel": {"plan": "auto", "gx": "auto", "gy": 2, "gz": "auto"}}).tensor_parallel
    assert by_word is not None and by_word.given == {"gy": 2}
    raw = auto_sizes.with_sizes({"axonn": {"tensor_parallel": {"plan": "planner"}}}, {"gx": 1, "gy": 2, "gz": 4})
    settled = parse(raw["axonn"]).tensor_parallel
    assert settled is not None and settled.given == {"gx": 1, "gy": 2, "gz": 4} and settled.plan == "auto"


def test_tokens_of_a_sample() -> None:
    raw = {"train_batch_size": 8}
    mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    with pytest.raises(ConfigError, match="add tokens_per_sample to the block"):
        auto_sizes.choose_sizes(mlp, block(), raw, 4, {}, Options())
    assert "planner" in auto_sizes.choose_sizes(mlp, block(tokens_per_sample=1), raw, 4, {}, Options()).why


def test_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AXONN_CACHE", str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    found = auto_sizes.this_machine(None)
    assert (found.name, found.domain, found.interfaces) == ("cpu", 4, 0.25)
    machine.measured_file().parent.mkdir()
    for name, taken in (
        ("summit", False),
        ("two-cores", True),
    ):  # GPUs, as of another machine with this home folder, and CPUs
        machine.measured_file().write_text(Path(machine.files.ours("machines")[name]).read_text())
        assert (auto_sizes.this_machine(None).tensor == machine.load(name).tensor) == taken
    assert auto_sizes.this_machine("alps").name == "alps"


def test_the_stand_in_keeps_deepspeeds_arithmetic() -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert stand_in(dict(zip(keys, (32, 2, 4), strict=True))) == Grid(gdata=4)
    assert stand_in({"train_batch_size": 32, "gradient_accumulation_steps": 4}) == Grid()
