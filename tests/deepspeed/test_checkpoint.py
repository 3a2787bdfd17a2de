"""A checkpoint continues the run exactly, is complete or absent whatever dies, and resumes on another grid."""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from axonn_plugins.cluster.launch import RankFailed
from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common import complete
from axonn_plugins.optim.flat import FlatOptimizer
from axonn_tp import layout_of
from axonn_tp.checkpoint import files, load, sums
from axonn_tp.comm.collectives import whole_parameter
from tests.deepspeed.scripts import one_sentence
from tests.deepspeed.training import Case, attempt, start, train, two_groups
from tests.distributed import run_ranks
from tests.matrix import asked, chosen, names

GRIDS = {"gx2gz2": (2, 1, 2), "gy2gz2": (1, 2, 2), "gz2gdata2": (1, 1, 2), "gx2gdata2": (2, 1, 1), "gx2gy2": (2, 2, 1)}
KINDS = (("fp32", "gz2gdata2"), ("fp32", "gx2gz2"), ("bf16", "gx2gz2"), ("fp16", "gx2gy2"))
RUNS = {f"{dtype}-zero{stage}-{grid}": (grid, dtype, stage) for stage in (0, 1, 2) for dtype, grid in KINDS}
EVERY_RUN = {"fp16-zero0-gx2gy2", "fp32-zero1-gz2gdata2", "bf16-zero2-gx2gz2"}
AT = 2
"""Steps before a checkpoint; two more show the weights and the states that were read."""


def case(grid: str, dtype: str = "fp32", stage: int = 0, **changes: Any) -> Case:
    from tests.deepspeed.test_engine import GPT_PLAN, gpt, ids

    extra: dict[str, Any] = {
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}}
    }
    if dtype == "fp16":
        extra["fp16"] = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}
    return Case(gpt, ids, GRIDS[grid], GPT_PLAN, stage, dtype, **{"extra": extra, "steps": AT + 2, **changes})


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
    train(engine, steps[1:AT])
    engine.save_checkpoint(str(place), "half", client_state={"epoch": 4})
    expected = train(engine, steps[AT:])
    again = fresh(run)
    path, state = again.load_checkpoint(str(place))
    got = train(again, steps[AT:])
    last = again.global_steps, [group["lr"] for group in again.optimizer.param_groups]
    same = last == (engine.global_steps, [group["lr"] for group in engine.optimizer.param_groups])
    folders = sorted(entry.name for entry in place.iterdir() if entry.suffix != ".py")
    return {"expected": expected, "got": got, "epoch": state["epoch"], "path": path, "same": same, "folders": folders}


def all_continued(folder: str, chosen_runs: dict[str, tuple[str, str, int]]) -> dict[str, Any]:
    return {name: attempt(continued, folder, *run) for name, run in chosen_runs.items()}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(all_continued, 4, str(tmp_path_factory.mktemp("checkpoints")), chosen(request, RUNS))


@pytest.mark.parametrize("name", names(RUNS, EVERY_RUN))
def test_continues_exactly(name: str, runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        found = rank[name]
        assert not isinstance(found, str), found
        assert found["got"] == found["expected"]
        assert found["same"] and found["epoch"] == 4 and found["path"]
        assert found["folders"] == ["half", "latest"]


def saved_twice() -> Case:
    """On two ranks along z."""
    return case("gz2gdata2", stage=1, steps=5)


def save_and_die(folder: str, when: str) -> None:
    """Rank 0 is killed while it saves for the second time."""
    run = saved_twice()
    engine = start(run)
    train(engine, run.batches()[:1])
    engine.save_checkpoint(folder, "one")
    first = train(engine, run.batches()[1:3])
    second = None
    if when == "before latest":
        keep = Path(folder) / "kept"
        engine.save_checkpoint(str(keep), "same")
        second = train(engine, run.batches()[3:])
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
        Path.rename = lambda self, to: die() if self.name == "one.incomplete" else rename(self, to)  # type: ignore
    else:
        torch.save = die


def resume(folder: str, tag: str | None, steps: tuple[int, int]) -> Any:
    run = saved_twice()
    engine = fresh(run)
    path, _ = engine.load_checkpoint(folder, tag)
    got = train(engine, run.batches()[steps[0] : steps[1]])
    engine.save_checkpoint(folder, "one")
    return path, got, sorted(entry.name for entry in Path(folder).iterdir())


DEATHS = ("before latest", "between renames", "while writing")


def all_resumed(folder: str) -> dict[str, Any]:
    found = {when: attempt(resume, f"{folder}/{when}", None, (1, 3)) for when in DEATHS}
    return found | {"tag": attempt(resume, f"{folder}/before latest", "two", (3, 5))}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("killed")
    for when in DEATHS:
        (folder / when).mkdir()
        with pytest.raises(RankFailed, match="rank 0 failed:\nit was ended by SIGKILL"):
            run_ranks(save_and_die, 2, str(folder / when), when)
    return folder, run_ranks(all_resumed, 2, str(folder))


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


@pytest.mark.parametrize(("step", "chosen"), [("take_place", None), ("replace", "one"), ("", "one")])
def test_killed_while_the_first_one_is_named(
    step: str, chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*arguments: Any) -> None:
        raise KeyboardInterrupt

    (tmp_path / "one.incomplete").mkdir()
    with monkeypatch.context() as patch:
        if step:
            patch.setattr(Path if step == "replace" else files, step, die)
        with pytest.raises(KeyboardInterrupt) if step else nullcontext():
            complete._rename(tmp_path, "one", sums.sums_of([], []), True)
    assert complete._chosen(tmp_path, None) == chosen


def test_a_tag_with_spaces_around_it_is_the_latest(tmp_path: Path) -> None:
    (tmp_path / " one .incomplete").mkdir()
    complete._rename(tmp_path, " one ", sums.sums_of([], []), True)
    assert complete._chosen(tmp_path, None) == " one "


def test_a_first_save_beside_stock_ones_was_killed(tmp_path: Path) -> None:
    """Before the name in ``latest`` changed: no start went on, as if the file were damaged."""
    for name, file in (("stock", "mp_rank_00_model_states.pt"), ("ours", "axonn_latest")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    (tmp_path / "latest").write_text("stock")
    with pytest.raises(
        ConfigError, match="latest names 'stock' and the checkpoint that was saved as the latest is ours"
    ):
        complete._chosen(tmp_path, None)
    (tmp_path / "latest.incomplete").write_text("ours")
    assert complete._chosen(tmp_path, None) == "ours"
    (tmp_path / "latest").write_text("stick")
    with pytest.raises(ConfigError, match="so it is damaged or was changed"):
        complete._chosen(tmp_path, None)


def without_frozen(folder: str) -> dict[str, Any]:
    """A run of which a layer is not trained, and one that goes on from its checkpoint without that layer."""
    run = case("gx2gz2", stage=1)

    def built() -> Any:
        model = run.model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".0." not in name)
        return model

    engine = start(run, built())
    train(engine, run.batches()[:AT])
    engine.save_checkpoint(folder, "one", exclude_frozen_parameters=True)
    expected, model = train(engine, run.batches()[AT:]), built()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * parameter.requires_grad)
    again = start(run, model)
    told = attempt(again.load_checkpoint, folder)
    again.load_checkpoint(folder, load_module_strict=False)
    tensors = torch.load(Path(folder) / "one" / "axonn" / "state.pt", weights_only=False)["tensors"]
    kept = {name: f"model.{name}" in tensors for name, _ in model.named_parameters()}
    wrong = [name for name, parameter in model.named_parameters() if kept[name] != parameter.requires_grad]
    return {
        "told": told,
        "wrong": wrong,
        "left": len(kept) - sum(kept.values()),
        "runs": (expected, train(again, run.batches()[AT:])),
    }


def test_frozen_parameters_are_left_out(tmp_path: Path) -> None:
    for found in run_ranks(without_frozen, 4, str(tmp_path)):
        assert (
            "ConfigError: the checkpoint was saved with exclude_frozen_parameters = True; pass load_module"
            in found["told"]
        )
        assert found["left"] > 3 and not found["wrong"] and found["runs"][0] == found["runs"][1]


def variant(name: str, stage: int, grid: str) -> Case:
    if name != "fp32 groups":
        return case(grid, name, stage)
    rates: list[Any] = [lambda step: 1 / (step + 1), lambda step: 1 / (step + 2)]
    run = case(grid, "fp32", stage, optimizer="client", groups=two_groups, lambdas=rates)
    run.extra = {}
    return run


# From a grid and a stage to others; float64 has only stage 0.
MOVES = {
    "fp64": ("gx2gz2", 0, [("gy2gz2", 0), ("gz2gdata2", 0)]),
    "fp32": ("gz2gdata2", 1, [("gx2gdata2", 1), ("gx2gz2", 2), ("gx2gy2", 0)]),
    "fp32 groups": ("gy2gz2", 2, [("gx2gdata2", 2)]),
    "bf16": ("gx2gz2", 2, [("gz2gdata2", 2), ("gy2gz2", 0)]),
    "fp16": ("gx2gdata2", 0, [("gz2gdata2", 1)]),
}
TARGETS = [f"{name}: {grid} zero{stage}" for name, (*_, to) in MOVES.items() for grid, stage in to]
MOVED = {"fp64: gy2gz2 zero0", "fp32: gx2gz2 zero2", "bf16: gy2gz2 zero0"}
"""In every run; groups and fp16 go on on a grid in test_stock_reading.py, too."""
ROUNDING = {"fp64": 1e-10, "fp32": 1e-6, "bf16": 2e-4, "fp16": 2e-5}
"""Of losses: some ten times what is seen, and far less than moments of another scale would make (2.7e-3 where stock's fp16 had them)."""


def serial_tensors(engine: Any) -> dict[str, torch.Tensor]:
    """Weights, float32 masters and moments of the serial model, as DeepSpeed's functions give them where states are ours."""
    found, ours = {}, isinstance(engine.optimizer, FlatOptimizer)
    for name, parameter in engine.module.named_parameters():
        whole = whole_parameter(parameter.detach(), layout_of(parameter), engine.mesh).clone()
        found |= {f"{name} weight": whole, f"{name} master": safe_get_full_fp32_param(parameter) if ours else whole}
        for key in ("exp_avg", "exp_avg_sq"):
            if ours:
                found[f"{name} {key}"] = safe_get_full_optimizer_state(parameter, key)
            else:
                shard = engine.optimizer.state[parameter][key]
                found[f"{name} {key}"] = whole_parameter(shard, layout_of(parameter), engine.mesh).clone()
    return found


def resumed_elsewhere(place: str, run: Case) -> dict[str, Any]:
    """Compare what an engine that resumed holds and computes with what the one that saved noted."""
    engine = fresh(run)
    path, state = engine.load_checkpoint(place)
    noted = torch.load(f"{place}/noted.pt")
    got = serial_tensors(engine)
    found = {
        "different": [name for name, value in noted["tensors"].items() if not torch.equal(value, got[name])],
        "counters": counters(engine) == noted["counters"] and state == {"epoch": 4} and bool(path),
        "expected": noted["losses"],
        "losses": train(engine, run.batches()[AT:])["losses"],
    }
    engine.destroy()
    return found


def counters(engine: Any) -> list[Any]:
    rates = sorted({group["lr"] for group in engine.optimizer.param_groups})
    scale = getattr(getattr(engine.optimizer, "loss_scaler", None), "cur_scale", 1.0)
    return [engine.global_steps, engine.global_samples, rates, scale]


def moved(folder: str, wanted: set[str]) -> dict[str, Any]:
    found = {}
    for name, (grid, stage, targets) in MOVES.items():
        if name not in ("fp64", "fp32", "bf16") and not any(target.startswith(f"{name}:") for target in wanted):
            continue
        run, place = variant(name, stage, grid), f"{folder}/{name}"
        engine = start(run)
        train(engine, run.batches()[:AT])
        engine.save_checkpoint(place, client_state={"epoch": 4})
        noted: dict[str, Any] = {"tensors": serial_tensors(engine), "counters": counters(engine)}
        noted["losses"] = train(engine, run.batches()[AT:])["losses"]
        engine.destroy()
        if dist.get_rank() == 0:
            torch.save(noted, f"{place}/noted.pt")
        dist.barrier()
        for other, other_stage in targets:
            target = f"{name}: {other} zero{other_stage}"
            if target in wanted:
                found[target] = attempt(resumed_elsewhere, place, variant(name, other_stage, other))
    return found | {"refused": refused(folder), "weights": weights_alone(f"{folder}/bf16")}


def without_a_schedule(engine: Any, place: str) -> None:
    """A run that has one would begin it anew without a word."""
    schedule, engine.lr_scheduler = engine.lr_scheduler, None
    engine.save_checkpoint(place, "one")
    engine.lr_scheduler = schedule
    assert engine.load_checkpoint(place, "one", load_lr_scheduler_states=False)[0] is not None
    engine.load_checkpoint(place, "one")


def beside(engine: Any, folder: str) -> bool:
    """True if what a script has put beside a checkpoint's files is there when it is saved again."""
    file = Path(folder) / "constant" / "one" / "settings.json"
    if dist.get_rank() == 0:
        file.write_text("{}")
    dist.barrier()
    engine.save_checkpoint(f"{folder}/constant", "one")
    return file.read_text() == "{}"


def refused(folder: str) -> dict[str, Any]:
    """Without the portable files, damaged, and with other keywords."""
    place = Path(folder) / "fp32" / f"global_step{AT}"
    engine = start(variant("fp32", 1, "gx2gdata2"))
    found = {"strict": attempt(lambda: engine.load_checkpoint(f"{folder}/fp32", custom_load_fn=print))}
    dist.barrier()
    if dist.get_rank() == 0:
        file = next(file for file in sorted((place / "axonn").glob("*.distcp")) if file.stat().st_size)
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    dist.barrier()
    found["damaged"] = attempt(engine.load_checkpoint, f"{folder}/fp32")
    dist.barrier()
    # A state that cannot be split anew.
    plain = start(variant("fp32", 0, "gx2gdata2"))
    train(plain, variant("fp32", 0, "gx2gdata2").batches()[:1])
    found |= {"schedule": attempt(without_a_schedule, plain, f"{folder}/constant"), "beside": beside(plain, folder)}
    next(iter(plain.optimizer.state.values()))["odd"] = torch.ones(2)
    return found | {"odd": attempt(plain.save_checkpoint, f"{folder}/odd", "one")}


def weights_alone(place: str) -> bool:
    """Masters then start from the half-precision weights, and the steps from 0."""
    engine = fresh(variant("bf16", 1, "gx2gy2"))
    engine.load_checkpoint(place, load_module_only=True)
    weights = torch.load(f"{place}/noted.pt")["tensors"]
    whole = engine.module.state_dict()
    named = list(engine.module.named_parameters())
    masters = all(torch.equal(safe_get_full_fp32_param(p), whole[n].float()) for n, p in named)
    same = all(torch.equal(whole[n], weights[f"{n} weight"]) for n, _ in named)
    # In another type, into a model that has more and trains less.
    other = fresh(variant("fp32", 0, "gx2gy2"))
    other.module.register_parameter("added", torch.nn.Parameter(torch.ones(3)))
    other.optimizer.param_groups[0]["params"].pop()
    other.load_checkpoint(place, load_module_strict=False, load_optimizer_states=False)
    wider = other.module.state_dict()
    same = same and all(torch.equal(wider[n], weights[f"{n} weight"].float()) for n, _ in named)
    return masters and same and not engine.global_steps and other.lr_scheduler.last_batch_iteration > 0


@pytest.fixture(scope="module")
def moves(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("moves")
    return folder, run_ranks(moved, 4, str(folder), {target for (target,) in asked(request, "target") if target})


@pytest.mark.parametrize("target", names(TARGETS, MOVED))
def test_resumes_on_another_grid(target: str, moves: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in moves[1]:
        found = rank[target]
        assert not isinstance(found, str), found
        assert found["different"] == [] and found["counters"]
        assert found["losses"] == pytest.approx(found["expected"], rel=ROUNDING[target[:4]])


def test_resumes_on_fewer_and_more_ranks(moves: tuple[Path, list[dict[str, Any]]]) -> None:
    for ranks, grid in ((2, (1, 2, 1)), (1, (1, 1, 1))):
        run = variant("fp64", 0, "gx2gz2")
        run.grid = grid
        for found in run_ranks(resumed_elsewhere, ranks, str(moves[0] / "fp64"), run):
            assert found["different"] == [] and found["counters"]
            assert found["losses"] == pytest.approx(found["expected"], rel=1e-10)


def test_plain_pytorch_goes_on_with_an_engines_checkpoint(moves: tuple[Path, list[dict[str, Any]]]) -> None:
    run = variant("fp64", 0, "gx2gz2")
    model = run.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    optimizer = torch.optim.AdamW(model.parameters())
    assert load(moves[0] / "fp64" / f"global_step{AT}" / "axonn", model, None, optimizer) == {"epoch": 4}
    noted = torch.load(moves[0] / "fp64" / "noted.pt")["tensors"]
    for name, parameter in model.named_parameters():
        for key, value in {"weight": parameter.detach(), **optimizer.state[parameter]}.items():
            assert key == "step" or torch.equal(value, noted[f"{name} {key}"])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("strict", "custom_load_fn"),
        ("damaged", "is damaged in"),
        ("odd", "odd"),
        ("schedule", "was saved without a schedule of the learning rate"),
    ],
)
def test_refused(case: str, words: str, moves: tuple[Path, list[dict[str, Any]]]) -> None:
    answers = {rank["refused"][case].splitlines()[0] for rank in moves[1]}
    assert len(answers) == 1
    answer = answers.pop()
    assert answer.startswith("ConfigError: ") and one_sentence(answer) and words in answer, answer


def test_files_of_the_script_stay_beside_a_checkpoint(moves: tuple[Path, list[dict[str, Any]]]) -> None:
    assert moves[1][0]["refused"]["beside"] is True


def test_weights_alone(moves: tuple[Path, list[dict[str, Any]]]) -> None:
    assert moves[1][0]["weights"]
