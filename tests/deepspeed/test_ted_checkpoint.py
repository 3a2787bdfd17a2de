"""Checkpoints of TED on other degrees, and in a stock engine: the run goes on as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest

from plugins.config import ConfigError
from tests.deepspeed.ted_training import Case, serial_run, start, train
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks

FIRST, REST = slice(0, 1), slice(1, None)
SAVED = {
    # Stock ZeRO-0 clips by a norm that has not all experts in it.
    "ZeRO-0": Case({"tensor": 2}, 2, clip=0.0),
    "ZeRO-1, bf16": Case({"tensor": 2}, 2, stage=1, dtype="bf16"),
    "whole experts": Case({"tensor": 2, "expert_tensor_parallel": False}, 4, stage=2),
}
BY_STOCK = {
    "ZeRO-0": Case({"tensor": 2}, 2, clip=0.0),
    "ZeRO-2, bf16": Case({"tensor": 2}, 4, stage=2, dtype="bf16", clip=0.0),
}
DEGREES: dict[str, tuple[dict[str, Any], int]] = {
    "same": ({"tensor": 2}, 2),
    "tensor 1, expert 4": ({}, 4),
    "tensor 4, expert 2": ({"tensor": 4}, 2),
    "tensor 8, expert 1": ({"tensor": 8}, 1),
    "whole experts": ({"tensor": 2, "expert_tensor_parallel": False}, 4),
}


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


def from_stock(case: Case, folder: str) -> Any:
    """What is said when the optimizer's states are wanted, too, and the loss with the weights alone."""
    engine = start(replace(case, ted=None))
    train(engine, case, FIRST)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    engine.destroy()
    engine = start(replace(case, seed=5))
    try:
        engine.load_checkpoint(folder)
        said = "loaded"
    except ConfigError as error:
        said = str(error)
    _, client = engine.load_checkpoint(folder, load_optimizer_states=False)
    found = said, client, engine.global_steps, train(engine, case, slice(1, 2))[0]
    engine.destroy()
    return found


def go(folder: str) -> Any:
    found: dict[Any, Any] = {}
    for name, case in SAVED.items():
        engine = start(case)
        train(engine, case, FIRST)
        place = str(Path(folder) / name)
        engine.save_checkpoint(place, client_state={"epoch": 3})
        engine.destroy()
        for degrees, (ted, ep_size) in DEGREES.items():
            other = replace(case, ted=ted, ep_size=ep_size)
            found[name, degrees] = attempt(resumed, other, place)
        # The data ranks of a stock engine are all ranks: a batch of its own.
        found[name, "stock"] = attempt(stock, replace(case, stage=0), place, name == "ZeRO-0")
    found["stock, ZeRO-1"] = attempt(stock, Case({"tensor": 2}, 4, stage=1), str(Path(folder) / "ZeRO-0"), False)
    for name, case in BY_STOCK.items():
        found["by stock", name] = attempt(from_stock, case, str(Path(folder) / f"by stock, {name}"))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(go, 8, str(tmp_path_factory.mktemp("checkpoints")))[0]


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("name", SAVED)
def test_goes_on_under_other_degrees(found: Any, name: str, degrees: str) -> None:
    assert not isinstance(found[name, degrees], str), found[name, degrees]
    client, steps, (losses, norms) = found[name, degrees]
    data = 8 // DEGREES[degrees][0].get("tensor", 1)
    expected, expected_norms = serial_run(SAVED[name], [4, data, data])
    tolerance = 2e-2 if SAVED[name].dtype == "bf16" else 2e-5
    assert client == {"epoch": 3} and steps == 1
    assert losses == pytest.approx(expected[REST], rel=tolerance)
    assert norms == pytest.approx(expected_norms[REST], rel=10 * tolerance)


@pytest.mark.parametrize("name", [*((name, "stock") for name in SAVED), "stock, ZeRO-1"], ids=str)
def test_goes_on_in_a_stock_engine(found: Any, name: Any) -> None:
    assert not isinstance(found[name], str), found[name]
    losses, _ = found[name]
    case = SAVED[name[0]] if isinstance(name, tuple) else SAVED["ZeRO-0"]
    expected, _ = serial_run(case, [4, 8, 8])
    assert losses == pytest.approx(expected[REST][: len(losses)], rel=2e-2 if case.dtype == "bf16" else 2e-5)


@pytest.mark.parametrize("name", BY_STOCK)
def test_goes_on_from_weights_that_a_stock_engine_wrote(found: Any, name: str) -> None:
    assert not isinstance(found["by stock", name], str), found["by stock", name]
    said, client, steps, losses = found["by stock", name]
    case = BY_STOCK[name]
    assert "pass load_optimizer_states=False for the weights alone" in said
    assert client == {"epoch": 3} and steps == 1
    assert losses == pytest.approx(serial_run(case, [8, 4])[0][1:], rel=2e-2 if case.dtype == "bf16" else 2e-5)
