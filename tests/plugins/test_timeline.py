"""The timeline of a step: every nanosecond is accounted for, under every host, and waits are told from the wire."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from axonn_plugins.cli import main
from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.deepspeed.patch import patch
from axonn_plugins.hosts.megatron.arguments import _watch_steps
from axonn_plugins.hosts.plain import compose
from axonn_plugins.observe.timeline import steps
from axonn_plugins.observe.timeline.account import PARTS, account
from axonn_plugins.observe.timeline.gather import bring_together, thinned
from axonn_plugins.observe.timeline.record import Call, Recorder, Span
from axonn_plugins.observe.timeline.report import read
from tests.deepspeed.training import deepspeed
from tests.distributed import run_ranks

LATE = 0.6


def complete(kept: dict[str, Any], ranks: int) -> None:
    """Assert that all of each rank's step is in the parts, and drawn without gaps."""
    assert [row["rank"] for row in kept["ranks"]] == list(range(ranks))
    for row in kept["ranks"]:
        assert sum(row["parts_ms"].values()) == pytest.approx(row["step_ms"], rel=1e-9)
        assert min(row["parts_ms"].values()) >= 0 and set(row["parts_ms"]) == set(PARTS)
        ends = [0.0, *(ended for _, ended, *_ in row["pieces"])]
        begins = [*(began for began, *_ in row["pieces"]), row["step_ms"]]
        assert ends == pytest.approx(begins, abs=2e-4)


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def in_plain_pytorch(folder: Path) -> None:
    os.environ["AXONN_TIMELINE"] = str(folder / "plain")
    run = compose(model(), torch.optim.AdamW, {"tensor_parallel": {"gx": 2, "gz": 2, "plan": "auto"}}, stage=1)
    for step in range(1, 7):
        between = Recorder()
        between.__enter__()  # as a script's own, which is there at the end of a step and leaves after it
        if step == 5 and dist.get_rank() == 3:
            time.sleep(LATE)
        run.backward(run.model(run.mesh.shard_batch(torch.ones(8, 16))).square().mean())
        run.step()
        between.__exit__(None, None, None)


def under_deepspeed(folder: Path) -> None:
    patch(deepspeed.runtime.config)
    os.environ.update(AXONN_TIMELINE=str(folder / "deepspeed"), AXONN_TIMELINE_STEP="2")
    steps._state.taken = 0
    settings = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "axonn": {"tensor_parallel": {"gx": 2, "gz": 2, "plan": "auto"}},
    }
    engine, *_ = deepspeed.initialize(model=model(), config=settings)
    for _ in range(2 * engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(1, 16)).square().mean())
        engine.step()
    assert engine.global_steps == 2


_library = torch.library.Library("axonn", "FRAGMENT")
_library.define("waits_within(Tensor input) -> Tensor")


def _waits_within(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor.clone()


_library.impl("waits_within", _waits_within, "CPU")


def by_others(folder: Path) -> dict[str, Any]:
    """A step of DistributedDataParallel, whose waits no operator shows, with a message from rank 0 to 1 that is late."""
    ddp = nn.parallel.DistributedDataParallel(model())
    ddp(torch.ones(2, 16)).sum().backward()
    watch, outer = Recorder(), Recorder()
    watch.begin()
    if dist.get_rank() == 0:
        time.sleep(LATE)
        dist.send(torch.ones(4), 1)
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(4), 0)
    ddp(torch.ones(2, 16)).sum().backward()
    torch.ops.axonn.waits_within(torch.ones(4))
    outer.__enter__()  # stays when the watch leaves
    watch.end()
    assert _get_current_dispatch_mode_stack() == [outer]
    outer.__exit__(None, None, None)
    around, watch_within = Recorder(), Recorder()
    around.__enter__()
    watch_within.begin()
    around.__exit__(None, None, None)  # takes the watch along
    watch_within.end()
    assert _get_current_dispatch_mode_stack() == []
    direct = Recorder()
    direct.begin()
    ones, wide, ranks = torch.ones(4), torch.ones(16), dist.get_world_size()
    dist.all_gather_into_tensor(wide, ones)
    dist.reduce_scatter_tensor(ones, wide)
    dist.all_to_all_single(torch.empty(4), ones)
    dist.gather(ones, list(wide.split(4)) if dist.get_rank() == 0 else None)
    direct.end()
    assert [call.op for call in direct.calls] == ["all_gather", "reduce_scatter", "all_to_all", "gather"] and ranks == 4
    assert [span.call for span in direct.spans if span.kind == "wait"] == direct.calls
    assert dist.Work.wait.__name__ == "wait" and not hasattr(dist.Work.wait, "__wrapped__")
    return bring_together(watch, 1)


def all_hosts(folder: Path) -> dict[str, Any]:
    in_plain_pytorch(folder)
    under_deepspeed(folder)
    return by_others(folder)


def test_the_parts_are_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = run_ranks(all_hosts, 4, tmp_path)[0]
    plain, _ = read(tmp_path / "plain")
    complete(plain, 4)
    assert plain["step"] == 5 and plain["clocks_ms"] == 0
    for row in plain["ranks"]:
        assert row["step_ms"] > LATE * 1e3 / 2 and row["collectives"] >= 5
        assert row["parts_ms"]["compute"] > 0 and row["parts_ms"]["python"] > 0 and row["parts_ms"]["wire"] > 0
        assert {"x", "z"} <= set(row["by_axis_ms"])
    waited = [row["parts_ms"]["waiting"] for row in plain["ranks"]]
    assert max(waited[:3]) > LATE * 1e3 / 4  # of those that were not late themselves, on a busy machine
    assert plain["ranks"][3]["parts_ms"]["idle"] > LATE * 1e3 / 2
    complete(read(tmp_path / "deepspeed")[0], 4)
    assert read(tmp_path / "deepspeed")[0]["step"] == 2
    complete(others, 4)
    assert all("all" in row["by_axis_ms"] for row in others["ranks"])
    assert others["ranks"][1]["parts_ms"]["waiting"] > LATE * 1e3 / 4
    assert main(["timeline", str(tmp_path / "plain")]) == 0
    printed = capsys.readouterr().out
    assert "step 5, milliseconds" in printed and "adding up" in printed
    assert (tmp_path / "plain" / "timeline.png").stat().st_size > 1000


def test_a_step_is_divided_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    watch = Recorder()
    call = Call(("g", 1), "all_reduce", "x", 2, 210, 10, torch.float32)
    watch.calls = [call]
    watch.began, watch.ended = (0, 1000), (1000, 1500)
    watch.spans = [
        Span("compute", 100, 200, (1050, 1130)),  # 20 of these without a processor
        Span("call", 210, 230, (1135, 1150), call),
        Span("wait", 400, 700, (1200, 1210), call),
        Span("adding", 700, 750, (1210, 1260)),
    ]
    found = account(watch, {("g", 1): 500}, {torch.float32: 3.0}, 2.0)
    assert found.nanoseconds == 1000 == sum(found.parts.values())
    assert found.parts == {
        "compute": 80,
        "adding up": 30 + 50,
        "wire": 700 - 500 - 30,
        "waiting": 5 + 100,
        "python": 50 + 5 + 15 + 50 + 240 - 8,
        "idle": 50 + 20 + 5 + 120 + 10,
        "measuring": 8,
    }
    assert found.by_axis == {"x": {"waiting": 105, "wire": 170, "adding up": 30}}
    assert thinned(found.pieces, 10**6)[0].ended == 1000


def test_what_a_wait_does_is_its_own() -> None:
    watch = Recorder()
    watch.begin()
    watch._watched_wait(lambda work: torch.ones(2).add_(1))(object())
    torch.ones(2)
    watch.end()
    assert [span.kind for span in watch.spans] == ["wait", "compute"]
    assert sum(account(watch, {}, {}, 0.0).parts.values()) == watch.ended[0] - watch.began[0]


def test_megatrons_step_is_the_one_of_its_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(steps, "_state", steps._State())
    monkeypatch.setenv("AXONN_TIMELINE", str(tmp_path))
    monkeypatch.setenv("AXONN_TIMELINE_STEP", "3")
    training = ModuleType("megatron.training.training")
    training.train_step = lambda number: torch.ones(number).sum()  # type: ignore[attr-defined]
    _watch_steps(training)
    _watch_steps(training)
    assert [training.train_step(number).item() for number in range(1, 5)] == [1, 2, 3, 4]
    kept = json.loads((tmp_path / "timeline.json").read_text())
    complete(kept, 1)
    assert kept["step"] == 3 and kept["ranks"][0]["operators"] == 2 and kept["unwatched_ms"] > 0


def test_mistakes_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["timeline", str(tmp_path)]) == 2
    assert "holds no timeline.json; start the training with AXONN_TIMELINE=" in capsys.readouterr().err
    for damaged in (
        "[1]",
        '{"step": 1, "ranks": []}',
        '{"step": 1, "ranks": [{"rank": 0}]}',
        '{"step": 1, "ranks": 3}',
    ):
        (tmp_path / "timeline.json").write_text(damaged)
        assert main(["timeline", str(tmp_path)]) == 2
        assert "holds no timeline.json; start" in capsys.readouterr().err
    monkeypatch.setenv("AXONN_TIMELINE_STEP", "1")
    with pytest.raises(ConfigError, match="AXONN_TIMELINE_STEP=1 is no step that can be watched"):
        steps.step_asked()
