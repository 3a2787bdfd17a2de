"""Checkpoints of TED on other degrees, and in a stock engine: the run goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch.distributed as dist

from axonn_plugins.config import ConfigError
from tests.deepspeed.ted_training import Case, serial_run, start, train
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks
from tests.matrix import asked, thorough

FIRST, REST = slice(0, 1), slice(1, None)
# Stock DeepSpeed clips by a norm that has not all experts in it.
DEALT = {"stage": 2, "round_robin_gradients": True, "reduce_bucket_size": 10**5, "allgather_bucket_size": 10**5}
SAVED = {
    "ZeRO-0": Case({"tensor": 2}, 2, clip=0.0),
    "ZeRO-1, bf16": Case({"tensor": 2}, 2, stage=1, dtype="bf16", clip=0.0),
    "ZeRO-2, ep_size 1": Case({"tensor": 2}, 1, stage=2, clip=0.0),
    "whole experts": Case(
        {"tensor": 2, "expert_tensor_parallel": False}, 4, stage=2, clip=0.0, extra={"zero_optimization": DEALT}
    ),
}
BY_STOCK = {
    "ZeRO-0": Case(None, 2, clip=0.0),
    "ZeRO-1, bf16": Case(None, 4, stage=1, dtype="bf16", clip=0.0),
    "ZeRO-2": Case(None, 2, stage=2, clip=0.0, extra={"zero_optimization": DEALT}),
}
DEGREES: dict[str, tuple[dict[str, Any], int]] = {
    "same": ({"tensor": 2}, 2),
    "tensor 1, expert 4": ({}, 4),
    "tensor 4, expert 2": ({"tensor": 4}, 2),
    "tensor 8, expert 1": ({"tensor": 8}, 1),
    "whole experts": ({"tensor": 2, "expert_tensor_parallel": False}, 4),
}

CASES = {**SAVED, **{f"by stock, {name}": case for name, case in BY_STOCK.items()}}
EVERY_RUN = {
    ("ZeRO-1, bf16", "tensor 1, expert 4"),
    ("whole experts", "same"),
    ("by stock, ZeRO-1, bf16", "whole experts"),
}
"""Each degree that four ranks have."""
STOCK = [*((name, "stock") for name in SAVED), ("ZeRO-0", "another ep_size")]
RESUMED = {
    (name, degrees): (name, degrees) in EVERY_RUN
    for name, case in CASES.items()
    for degrees in (DEGREES if case.ted and case.ep_size > 1 else ["same", "tensor 4, expert 2", "whole experts"])
}
"""Cases, and True for those of every run."""
OF_EIGHT = {"tensor 4, expert 2", "tensor 8, expert 1"}
"""Degrees that four ranks do not have."""


def resumed(case: Case, folder: str) -> Any:
    engine = start(replace(case, seed=5))
    _, client = engine.load_checkpoint(folder)
    found = client, engine.global_steps, train(engine, case, REST)
    engine.destroy()
    return found


def stock(case: Case, folder: str, states: bool) -> Any:
    engine = start(replace(case, ted=None, seed=5))
    assert type(engine) is deepspeed.DeepSpeedEngine
    engine.load_checkpoint(folder, load_optimizer_states=states)
    # Without states only the weights go on: one loss.
    found = train(engine, case, REST if states else slice(1, 2))
    engine.destroy()
    return found


def weights(case: Case, folder: str) -> Any:
    engine = start(replace(case, seed=5))
    engine.load_checkpoint(folder, load_optimizer_states=False)
    found = engine.global_steps, train(engine, case, slice(1, 2))[0]
    engine.destroy()
    return found


def go(name: str, folder: str, others: list[str]) -> Any:
    """A case is saved, and goes on under other degrees; ranks of its own, for groups of gloo keep threads that poll."""
    found: dict[Any, Any] = {"ranks": dist.get_world_size()}
    case = CASES[name]
    engine = start(case)
    train(engine, case, FIRST)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    engine.destroy()
    for degrees in others:
        ted, ep_size = DEGREES[degrees]
        found[degrees] = attempt(resumed, replace(case, ted=ted, ep_size=ep_size), folder)
    if case.ted is not None:
        # The data ranks of a stock engine are all ranks: a batch of its own.
        found["stock"] = attempt(stock, case, folder, True)
    if name == "ZeRO-0":
        found["another ep_size"] = attempt(stock, Case(None, 4, stage=1, clip=0.0), folder, False)
    ours = Case({"tensor": 2}, 2, stage=1, clip=0.0)
    if name == "by stock, ZeRO-1, bf16":
        found["weights"] = attempt(weights, ours, folder)
    if name == "by stock, ZeRO-0":
        found["no states"] = attempt(no_states, ours, folder)
    return found


def no_states(case: Case, folder: str) -> str:
    """Errors where a checkpoint's states cannot be read."""
    if dist.get_rank() == 0:
        for file in Path(folder).glob("*/expp_rank_*"):
            file.unlink()
    dist.barrier()
    engine = start(case)
    try:
        engine.load_checkpoint(folder)
    except ConfigError as error:
        return str(error)
    finally:
        engine.destroy()
    return "loaded"


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    pairs = asked(request, "name", "degrees")

    def gone(name: str) -> Any:
        others = [degrees for saved, degrees in RESUMED if saved == name and (saved, degrees) in pairs]
        ranks = 8 if OF_EIGHT.intersection(others) else 4
        return run_ranks(go, ranks, name, str(tmp_path_factory.mktemp("checkpoint")), others)[0]

    return cache(gone)


@pytest.mark.parametrize(
    ("name", "degrees"), [pair if every_run else thorough(*pair) for pair, every_run in RESUMED.items()]
)
def test_goes_on_under_other_degrees(found: Any, name: str, degrees: str) -> None:
    assert not isinstance(found(name)[degrees], str), found(name)[degrees]
    client, steps, (losses, norms) = found(name)[degrees]
    case = CASES[name]
    ranks = found(name)["ranks"]
    data = ranks // DEGREES[degrees][0].get("tensor", 1)
    expected, expected_norms = serial_run(case, [ranks // case.tensor, data, data])
    tolerance = 2e-2 if case.dtype == "bf16" else 1e-6
    assert client == {"epoch": 3} and steps == 1
    assert losses == pytest.approx(expected[REST], rel=tolerance)
    assert norms == pytest.approx(expected_norms[REST], rel=10 * tolerance)


@pytest.mark.parametrize(("name", "way"), [case if case[0] in dict(EVERY_RUN) else thorough(*case) for case in STOCK])
def test_goes_on_in_a_stock_engine(found: Any, name: str, way: str) -> None:
    assert not isinstance(found(name)[way], str), found(name)[way]
    losses, _ = found(name)[way]
    case = SAVED[name]
    ranks = found(name)["ranks"]
    expected, _ = serial_run(case, [ranks // case.tensor, ranks, ranks])
    assert losses == pytest.approx(expected[REST][: len(losses)], rel=2e-2 if case.dtype == "bf16" else 1e-6)


def test_takes_the_weights_alone_in_another_type(found: Any) -> None:
    (steps, losses), ranks = (found("by stock, ZeRO-1, bf16")[key] for key in ("weights", "ranks"))
    assert steps == 1
    assert losses == pytest.approx(serial_run(BY_STOCK["ZeRO-1, bf16"], [ranks, ranks // 2])[0][1:], rel=2e-2)


def test_says_what_to_do_without_states(found: Any) -> None:
    said = found("by stock, ZeRO-0")["no states"]
    assert "has no states of an optimizer; pass load_optimizer_states=False for the weights alone" in said
    assert "\n" not in said
