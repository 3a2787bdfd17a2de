"""The quickstart as a user runs it: parallel equals serial, the plan is what happens, nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import axonn_plugins
import tests.deepspeed.training  # noqa: F401  without a kernel that takes a minute to compile
from axonn_plugins.cli import main
from axonn_plugins.cluster.launch import launch
from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common.tensor_parallel import layer_plans
from axonn_plugins.hosts.deepspeed.tensor.config import grid_for
from axonn_plugins.observe.ledger import Ledger
from axonn_recipes.data import load
from axonn_recipes.quickstart import recipe, report
from axonn_recipes.quickstart.loop import Outcome
from axonn_recipes.quickstart.settings import Settings, asked, find_run, resolve, stored_settings
from axonn_recipes.quickstart.sides import Parallel, Serial
from tests.axonn_tp.counting import joined_over_z
from tests.forked import Forked
from tests.matrix import asked as asked_for
from tests.matrix import thorough

SMALL = {"layers": 2, "heads": 4, "hidden": 48, "context": 16, "batch": 8}
COMMAND = [
    *["axonn", "train", "quickstart", "--save-every", "3", "--precision", "fp32"],
    *[word for name, value in SMALL.items() for word in (f"--{name}", str(value))],
]
pytestmark = pytest.mark.usefixtures("cpu")


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def losses(parallel: bool, settings: Settings, folder: Path) -> list[float]:
    torch.set_num_threads(1)
    axonn_plugins.activate()
    corpus = load(None, settings.context)
    side = (Parallel if parallel else Serial)(settings, corpus, folder)
    return [side.step(number)[0] for number in range(1, settings.steps + 1)]


@pytest.mark.parametrize(
    ("precision", "grid", "steps", "allowed"),
    [("fp64", (2, 1, 2), 8, 1e-9), ("bf16", (1, 2, 1), 8, 2e-2)]
    + [
        thorough("fp64", (2, 1, 2), 50, 1e-9),
        thorough("fp32", (2, 1, 2), 10, 1e-5),
        thorough("bf16", (1, 2, 2), 10, 2e-2),
    ],
)
def test_losses_equal_serial(precision: str, grid: tuple, steps: int, allowed: float, tmp_path: Path) -> None:
    gx, gy, gz = grid
    settings = Settings(steps=steps, precision=precision, gx=gx, gy=gy, gz=gz, ranks=gx * gy * gz, **SMALL)
    serial = launch(losses, 1, False, settings, tmp_path)[0]
    parallel = launch(losses, settings.ranks, True, settings, tmp_path)
    assert all(curve == parallel[0] for curve in parallel)
    assert max(abs(a - b) for a, b in zip(serial, parallel[0], strict=True)) < allowed
    assert serial[-1] < serial[0] - 0.3  # the text is the source of the Python that runs


Grid = tuple[int, int, int]
Planned = tuple[Counter, Counter, Counter, int, int]
GRIDS: list[Grid] = [(2, 1, 2), (1, 2, 1)]
MORE: list[Grid] = [(1, 2, 2), (1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 2, 1)]


def all_planned_and_counted(folder: Path, grids: list[Grid]) -> dict[Grid, Planned]:
    torch.set_num_threads(1)
    axonn_plugins.activate()
    sizes = {(gx, gy, gz): Settings(steps=5, gx=gx, gy=gy, gz=gz, **SMALL) for gx, gy, gz in grids}
    return {grid: planned_and_counted(settings, folder) for grid, settings in sizes.items()}


def planned_and_counted(settings: Settings, folder: Path) -> Planned:
    side = Parallel(settings, load(None, settings.context), folder)
    for number in (1, 2, 3):
        side.step(number)  # the engine's own checks are over then
    with Ledger(side.engine.mesh.axis_names()) as ledger:
        side.step(4)
    block = report.block_of(settings)
    plan = report.plan(settings, grid_for(block, settings.ranks), layer_plans(block))
    held = sum(p.numel() for p in side.engine.module.parameters())
    # But for norms, a number for each parameter, and flags for which of them have gradients, with one more.
    parameters = len(list(side.engine.module.parameters()))
    counted = [c for c in ledger.collectives if c.op != "all_reduce" or c.elements > parameters + 1]
    sums = Counter((c.op, c.size, c.elements) for c in plan.optimizer)
    seen = [next(c for c in counted if (c.op, c.size, c.elements) == each) for each in sums.elements()]
    passes = Counter(map(str, joined_over_z(plan.model)))
    model = joined_over_z((Counter(counted) - Counter(seen)).elements())
    rest = [c for c in model if not passes[str(c)]]
    return (
        passes,
        Counter(map(str, model)),
        Counter((c.op, c.size, c.elements) for c in rest),
        held,
        sum(plan.local.values()),
    )


@pytest.fixture(scope="module")
def on_grids(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Grid, Planned]:
    grids = [grid for grid in GRIDS + MORE if (grid,) in asked_for(request, "grid")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        return launch(all_planned_and_counted, 4, tmp_path_factory.mktemp("planned"), grids)[0]


@pytest.mark.parametrize("grid", [*GRIDS, *map(thorough, MORE)])
def test_the_printed_plan_is_what_happens(grid: Grid, on_grids: dict[Grid, Planned]) -> None:
    gx, gy, _ = grid
    passes, counted, rest, held, planned = on_grids[grid]
    assert held == planned
    assert all(counted[collective] == times for collective, times in passes.items())
    # Replicas compare each call's arguments, order of weight gathers and random state, in one gather.
    compared = Counter({("all_gather", 4, 7): 1}) if gx * gy > 1 else Counter()
    assert rest == compared


def start(run: str, folder: Path, *options: str, fresh: bool = False) -> Any:
    command = [*COMMAND[1:], "--runs", str(folder), *options]
    command += ["--resume", "--name", run] if "--resume" in options else ["--name", run]
    if not fresh:
        return Forked(command)
    whole = [sys.executable, "-m", "axonn_plugins.cli", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def curve(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def wait_for_steps(process: Any, count: int) -> None:
    """Until the process, not an earlier one, has printed so many steps."""
    printed = []
    while count and (line := process.stdout.readline()):
        printed.append(line)
        count -= line.startswith("step ")
    assert not count, "".join(printed)


TWO_RANKS = ["--ranks", "2", "--gx", "1"]


@pytest.mark.parametrize(
    ("kills", "options"),
    [
        ([(0.0, 4)], ["--steps", "12", *TWO_RANKS]),
        thorough([(0.0, 4), (0.15, 7)], ["--steps", "14"]),
    ],
    ids=len,
)
def test_killed_stopped_and_resumed_runs_go_on_exactly(
    kills: list[tuple[float, int]], options: list[str], tmp_path: Path
) -> None:
    """Killed so many seconds after so many steps; the first of a thorough test is by an interpreter of its own."""
    whole = start("whole", tmp_path, *options, fresh=len(kills) > 1)
    text = whole.communicate()[0]
    assert whole.returncode == 0, text
    assert "validation loss" in text
    for what in ("metrics.jsonl", "tensorboard", "loss.png", "checkpoints"):
        assert (tmp_path / "whole" / what).exists()
    for seconds, after in kills:
        name = f"killed-{after}"
        killed = start(name, tmp_path, *options)
        wait_for_steps(killed, after)
        time.sleep(seconds)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        again = start(name, tmp_path, "--resume")
        wait_for_steps(again, 2)
        again.send_signal(signal.SIGTERM)
        text = again.communicate()[0]
        assert again.returncode == 143, text
        last = start(name, tmp_path, "--resume")
        text = last.communicate()[0]
        assert last.returncode == 0, text
        assert curve(tmp_path / name) == curve(tmp_path / "whole")


def on_ranks(settings: Settings, folder: Path, last: int) -> list[float]:
    """Losses from where the folder's checkpoint is, or the start, to step `last`."""
    torch.set_num_threads(1)
    axonn_plugins.activate()
    side = Parallel(settings, load(None, settings.context), folder, keep=1, trace=[2, 3])
    done = side.load()
    found = [side.step(number)[0] for number in range(done + 1, last + 1)]
    side.save(last)
    return found


def test_goes_on_with_more_ranks(tmp_path: Path) -> None:
    settings = Settings(steps=6, precision="fp32", gx=1, ranks=2, **SMALL)
    serial = launch(losses, 1, False, settings, tmp_path)[0]
    (tmp_path / "checkpoints" / "step_000009.incomplete").mkdir(parents=True)
    first = launch(on_ranks, 2, settings, tmp_path, 3)[0]
    second = launch(on_ranks, 4, replace(settings, ranks=4, gx=2), tmp_path, 6)[0]
    assert len(second) == 3
    events = json.loads((tmp_path / "trace-rank0.json").read_text())["traceEvents"]
    traced = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    # Two steps: weights share gathers, and their gradients two sums; ZeRO-1 scatters the rest over z, which is all ranks.
    assert traced["all_gather z"] >= 2 and traced["reduce_scatter z"] == 2 * 3 and traced["all_reduce z"]
    assert max(abs(a - b) for a, b in zip(serial, first + second, strict=True)) < 1e-4
    kept = {found.name for found in (tmp_path / "checkpoints").glob("step_*")}
    assert kept == {"step_000006", "step_000009.incomplete"}


def test_check_compares_both_ways(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND[1:], "--steps", "2", *TWO_RANKS, "--check", "--runs", str(tmp_path)]) == 0
    assert "largest difference of the losses" in capfd.readouterr().out


def test_losses_that_are_no_numbers_are_beyond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = {True: [2.0, 1.0, 0.5], False: [2.0, float("nan"), float("nan")]}
    monkeypatch.setattr(
        recipe, "load", lambda *_: SimpleNamespace(files=1, source="", training="", validation="", digest="")
    )
    monkeypatch.setattr(
        recipe, "_train", lambda settings, *_: Outcome(dict(enumerate(curves[settings.serial], 1)), 1.0, step=3)
    )
    assert main([*COMMAND[1:], "--steps", "3", *TWO_RANKS, "--check", "--runs", str(tmp_path)]) == 1
    assert "nan nats at step 2 of 3" in (said := capsys.readouterr().out) and "BEYOND" in said


def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart", "--dry-run", "--runs", str(tmp_path), "--gz", "4", "--gx", "1"]) == 0
    text = capsys.readouterr().out
    assert "gx=1 gy=1 gz=4 gdata=1" in text and '"axonn3d"' in text and "collectives" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gx", "3"], "gx*gy*gz = 3*1*2 = 6 does not divide the 4 ranks"),
        (["--gx", "4", "--gz", "1", "--heads", "2"], "2 heads do not divide by gx = 4"),
        (["--trace-steps", "5", "3"], "trace_steps = [5, 3] is not two steps of at least 1"),
        (["--trace-steps", "1", "3", "--serial"], "leave it or --serial out"),
        (["--keep-last", "0"], "--keep-last 0 is not at least 1"),
        (["--batch", "31"], "train_batch_size = 31 does not divide"),
        (["--hidden", "250"], "--hidden 250 does not divide into --heads 8"),
        (["--steps", "0"], "--steps 0 is not at least 1"),
        (["--context", f"{10**20}"], f"--context {10**20} is more than 1,000,000,000"),
        (["--data", "nowhere"], "--data nowhere does not exist"),
        (["--resume"], "--resume finds no run"),
        (["--lr", "nan"], "--lr nan is not positive"),
        (["--seed", "-1"], "--seed -1 is not from 0 and below 2**32"),
        (["--check", "--serial"], "--check trains serially and in parallel; leave it or --serial out"),
        (["--gy", "3", "--gz", "1", "--gx", "1", "--ranks", "3"], "256 features do not divide by gy = 3"),
    ],
)
def test_mistakes_are_one_sentence(
    options: list, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "quickstart", "--runs", str(tmp_path), *options]) == 2
    error = capfd.readouterr().err
    assert words in error and error.startswith("axonn: error: ") and error.count("\n") == 1


def test_unknown_recipe_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstrat"]) == 2
    assert 'use "quickstart"' in capsys.readouterr().err


def test_resume_keeps_the_settings(tmp_path: Path) -> None:
    stored = Settings(steps=7, hidden=64, tied=True)
    assert resolve(asked(["--resume"], stored), stored) == stored
    assert resolve(asked(["--resume", "--tied", "--steps", "7"], stored), stored) == stored
    with pytest.raises(ConfigError, match="--steps 9 contradicts"):
        resolve(asked(["--resume", "--steps", "9"], stored), stored)
    for written in ("", "{}", '{"settings": {"unheard_of": 1}, "corpus": ""}'):
        (tmp_path / "run.json").write_text(written)
        with pytest.raises(ConfigError, match="holds no settings that this version knows"):
            stored_settings(tmp_path)
    elsewhere = resolve(asked(["--resume", "--ranks", "8", "--gz", "4"], stored), stored)
    assert elsewhere == replace(stored, ranks=8, gz=4)
    (tmp_path / "quickstart").mkdir()
    assert find_run(tmp_path, None, resume=False).name == "quickstart-2"
    with pytest.raises(ConfigError, match="exists"):
        find_run(tmp_path, "quickstart", resume=False)


def test_corpus_is_deterministic_and_held_out_text_is_apart(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number:02d}.txt").write_text(f"text number {number} " * 20)
    first, second = load(str(tmp_path), 16), load(str(tmp_path), 16)
    assert first.digest == second.digest and first.files == 60
    training, validation = (bytes(part.numpy()) for part in (first.training, first.validation))
    assert all((f"number {n} ".encode() in training) != (f"number {n} ".encode() in validation) for n in range(60))
    ids, targets = first.batch("training", 4, 16, seed=3)
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    assert torch.equal(ids, second.batch("training", 4, 16, seed=3)[0])
    assert not torch.equal(ids, first.batch("training", 4, 16, seed=4)[0])
    single = load(str(tmp_path / "00.txt"), 16)
    assert bytes(single.training.numpy()) + bytes(single.validation.numpy()) == (tmp_path / "00.txt").read_bytes()
