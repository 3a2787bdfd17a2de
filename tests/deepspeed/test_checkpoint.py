"""A checkpoint continues the run exactly, is complete or absent whatever dies, and is refused on another grid."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plugins.launch import RankFailed
from tests.deepspeed.scripts import one_sentence
from tests.deepspeed.training import Case, attempt, start, train
from tests.distributed import run_ranks

GRIDS = {"gx2gz2": (2, 1, 2), "gy2gz2": (1, 2, 2), "gz2gdata2": (1, 1, 2), "gx2gdata2": (2, 1, 1), "gx2gy2": (2, 2, 1)}
RUNS = {
    f"{dtype}-zero{stage}-{grid}": (grid, dtype, stage)
    for stage in (0, 1, 2)
    for dtype, grid in (("fp32", "gz2gdata2"), ("fp32", "gx2gz2"), ("bf16", "gx2gz2"), ("fp16", "gx2gy2"))
}


def case(grid: str, dtype: str = "fp32", stage: int = 0, **changes: Any) -> Case:
    from tests.deepspeed.test_engine import GPT_PLAN, gpt, ids

    extra: dict[str, Any] = {
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}}
    }
    if dtype == "fp16":
        extra["fp16"] = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}
    return Case(gpt, ids, GRIDS[grid], GPT_PLAN, stage, dtype, extra=extra, **changes)


def fresh(run: Case) -> Any:
    """An engine whose weights are not those of the run."""
    model = run.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    return start(run, model)


def continued(folder: str, grid: str, dtype: str, stage: int) -> dict[str, Any]:
    run = case(grid, dtype, stage)
    steps = run.batches()
    place = Path(folder) / f"{grid}-{dtype}-{stage}"
    if dist.get_rank() == 0:
        for leftover in ("half.incomplete", "half.replaced"):
            (place / leftover).mkdir(parents=True)
            (place / leftover / "mp_rank_00_model_states.pt").write_text("cut off")
    dist.barrier()
    engine = start(run)
    train(engine, steps[:1])
    engine.save_checkpoint(str(place), "half")
    train(engine, steps[1:3])
    engine.save_checkpoint(str(place), "half", client_state={"epoch": 4})
    expected = train(engine, steps[3:])
    again = fresh(run)
    path, state = again.load_checkpoint(str(place))
    got = train(again, steps[3:])
    last = again.global_steps, [group["lr"] for group in again.optimizer.param_groups]
    same = last == (engine.global_steps, [group["lr"] for group in engine.optimizer.param_groups])
    folders = sorted(entry.name for entry in place.iterdir() if entry.suffix != ".py")
    return {"expected": expected, "got": got, "epoch": state["epoch"], "path": path, "same": same, "folders": folders}


def all_continued(folder: str) -> dict[str, Any]:
    return {name: attempt(continued, folder, *run) for name, run in RUNS.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(all_continued, 4, str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.parametrize("name", RUNS)
def test_continues_exactly(name: str, runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        found = rank[name]
        assert not isinstance(found, str), found
        assert found["got"] == found["expected"]
        assert found["same"] and found["epoch"] == 4 and found["path"]
        assert found["folders"] == ["half", "latest"]


def save_and_die(folder: str, when: str) -> None:
    """Rank 0 is killed while it saves for the second time."""
    run = case("gx2gz2", stage=1)
    engine = start(run)
    train(engine, run.batches()[:2])
    engine.save_checkpoint(folder, "one")
    first = train(engine, run.batches()[2:4])
    second = None
    if when == "before latest":
        keep = Path(folder) / "kept"
        engine.save_checkpoint(str(keep), "same")
        second = train(engine, run.batches()[4:])
        engine.load_checkpoint(str(keep), "same")
    if dist.get_rank() == 0:
        (Path(folder) / "expected.json").write_text(json.dumps([first, second]))
        _die_in(when)
    engine.save_checkpoint(folder, "two" if when == "before latest" else "one")


def _die_in(when: str) -> None:
    def die(*arguments: Any, **keywords: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    rename = Path.rename
    if when == "before latest":
        Path.replace = die  # type: ignore[method-assign,assignment]
    elif when == "between renames":
        Path.rename = lambda self, to: die() if self.name.endswith(".incomplete") else rename(self, to)  # type: ignore
    else:
        torch.save = die


def resume(folder: str, tag: str | None, steps: tuple[int, int]) -> Any:
    run = case("gx2gz2", stage=1)
    engine = fresh(run)
    path, _ = engine.load_checkpoint(folder, tag)
    got = train(engine, run.batches()[steps[0] : steps[1]])
    engine.save_checkpoint(folder, "one")
    return path, got, sorted(entry.name for entry in Path(folder).iterdir())


DEATHS = ("before latest", "between renames", "while writing")


def all_resumed(folder: str) -> dict[str, Any]:
    found = {when: attempt(resume, f"{folder}/{when}", None, (2, 4)) for when in DEATHS}
    return found | {"tag": attempt(resume, f"{folder}/before latest", "two", (4, 6))}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("killed")
    for when in DEATHS:
        (folder / when).mkdir()
        with pytest.raises(RankFailed, match="rank 0 failed:\nit was ended by SIGKILL"):
            run_ranks(save_and_die, 4, str(folder / when), when, timeout=120)
    return folder, run_ranks(all_resumed, 4, str(folder), timeout=120)


@pytest.mark.parametrize("when", DEATHS)
def test_killed_while_saving(when: str, killed: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, ranks = killed
    first, second = json.loads((folder / when / "expected.json").read_text())
    for rank in ranks:
        assert not isinstance(rank[when], str), rank[when]
        path, got, names = rank[when]
        assert path and got == first
        assert "one" in names and "one.incomplete" not in names and "one.replaced" not in names
        if second is not None:
            assert rank["tag"][1] == second
    assert (folder / when / "latest").read_text() == "one"


def square() -> torch.nn.Module:
    """Each rank's tensors have the same sizes on all grids of four ranks."""
    from tests.deepspeed.test_engine import Regression

    return Regression(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))


MODELS = {
    "gpt": lambda grid: case(grid, stage=1),
    "square": lambda grid: Case(square, lambda: (torch.randn(8, 16), torch.randn(8, 16)), GRIDS[grid]),
}


def on_other_grids(folder: str) -> dict[str, Any]:
    found = {}
    for model, run in MODELS.items():
        for grid in GRIDS:
            engine = start(run(grid))
            train(engine, run(grid).batches()[:1])
            engine.save_checkpoint(f"{folder}/{model}-{grid}")
        for grid in GRIDS:
            engine = start(run(grid))
            for saved in GRIDS:
                answer = attempt(engine.load_checkpoint, f"{folder}/{model}-{saved}")
                found[f"{model}: {saved} on {grid}"] = answer if isinstance(answer, str) else "loaded"
    return found


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(on_other_grids, 4, str(tmp_path_factory.mktemp("grids")), timeout=120)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("saved", GRIDS)
@pytest.mark.parametrize("model", MODELS)
def test_other_grids_are_refused(model: str, saved: str, grid: str, others: list[dict[str, Any]]) -> None:
    for rank in others:
        answer = rank[f"{model}: {saved} on {grid}"]
        if saved == grid:
            assert answer == "loaded"
        else:
            assert answer.startswith("ConfigError: ") and one_sentence(answer.splitlines()[0]), answer
            assert "gx" in answer
