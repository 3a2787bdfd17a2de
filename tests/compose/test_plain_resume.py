"""A run of plain PyTorch's `compose` goes on elsewhere: on another grid, other stages, other experts, pruned or dense, under DeepSpeed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from axonn_plugins.hosts.plain import Run, compose
from axonn_plugins.optim.loss_scale import LossScale
from axonn_tp.checkpoint import CheckpointError, load, save
from tests.compose.noise import GradientNoise  # noqa: F401 - the key of the block
from tests.compose.training import Case, adamw, built, ready, serial_run, start, train, train_plain
from tests.deepspeed.scripts import one_sentence
from tests.deepspeed.training import attempt
from tests.distributed import made_once, run_ranks
from tests.matrix import chosen, names

CLOSE, MIDDLE, STEPS = 1e-10, 2, 5
NOISE: dict[str, Any] = {"gradient_noise": {"std": 0.3}}
"""It becomes less with each step, so that a count that begins anew shows."""
PRUNED: dict[str, Any] = {
    "samo": {"sparsity": 0.7, "schedule": {"initial": 0.3, "interval": 2, "end_step": 4}},
}
OFFLOAD: dict[str, Any] = {"offload_optimizer": {"bucket_size": 1024}}


def grid(**sizes: int) -> dict[str, Any]:
    return {"tensor_parallel": {"plan": "auto", **sizes}}


# Name: saved by, and gone on with; as many ranks read different data in both.
MOVES = {
    "the same": (Case({**grid(gx=2, gz=2), **NOISE}, 2), Case({**grid(gx=2, gz=2), **NOISE}, 2)),
    "another grid": (Case({**grid(gx=2, gz=2), **NOISE}, 2), Case({**grid(gy=2), **NOISE, **OFFLOAD}, 0)),
    "pruned further, other experts": (
        Case({**grid(gx=2), "ted": {}, **PRUNED, **OFFLOAD}, 1, experts=2),
        Case({**grid(gy=2), "ted": {}, **PRUNED}, 2, experts=1),
    ),
}
EVERY_RUN = set(MOVES) - {"the same"}


def begin(case: Case, **how: Any) -> Run:
    return compose(built(case), adamw, case.block, stage=case.stage, max_norm=case.clip, **how)


def moved(folder: str, first: Case, second: Case) -> Any:
    """Losses and norms of a run behind its checkpoint, those of one that goes on there, and those of one process."""
    run = begin(first)
    train_plain(run, first, range(MIDDLE))
    run.save(folder)
    wanted = train_plain(run, first, range(MIDDLE, STEPS))
    other = begin(second)
    assert other.load(folder) is None and other.steps == MIDDLE
    found = train_plain(other, second, range(MIDDLE, STEPS))
    return found, wanted, [each[MIDDLE:] for each in serial_run(first, run.mesh.grid.batch)]


def under_deepspeed(folder: str) -> dict[str, Any]:
    """From an engine to a run of `compose`, and on to an engine: losses and norms of the steps, and those of one process."""
    cases = [Case(grid(gz=2), 2), Case(grid(gx=2, gz=2), 1), Case({**grid(gz=4), **OFFLOAD}, 0)]
    cases = [Case(case.block, case.stage, steps=6) for case in cases]
    engine = start(cases[0])
    losses, norms = train(engine, cases[0], range(2))
    engine.save_checkpoint(folder, client_state={"seen": 2})
    engine.destroy()
    run = begin(cases[1])
    extra = run.load(folder)  # its latest
    more = train_plain(run, cases[1], range(2, 4))
    run.save(f"{folder}/plain", extra={"seen": 4})
    engine = start(cases[2])
    path, client = engine.load_checkpoint(folder, tag="plain")
    counts = engine.global_steps, engine.global_samples, engine.skipped_steps
    last = train(engine, cases[2], range(4, 6))
    engine.destroy()
    return {
        "losses": losses + more[0] + last[0],
        "norms": norms + more[1] + last[1],
        "wanted": serial_run(cases[0], 2),
        "extra": (extra, client),
        "counts": counts,
    }


def schedules(folder: str) -> dict[str, Any]:
    """A scheduler, a loss scale that grows, what else is kept, a save in the background: all go on."""
    case, other = Case({**grid(gx=2), **OFFLOAD}, 1, steps=STEPS), Case(grid(gz=4), 2, steps=STEPS)
    found: dict[str, Any] = {}

    def made(which: Case, scale: float) -> tuple[Run, Any]:
        run = begin(which, loss_scale=LossScale(scale, growth_interval=1))
        return run, torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1 / (1 + step))

    def go_on(run: Run, scheduler: Any, which: Case, steps: range) -> Any:
        seen = []
        for step in steps:
            losses, norms = train_plain(run, which, range(step, step + 1))
            scheduler.step()
            assert run.optimizer.loss_scale is not None
            seen.append([*losses, *norms, scheduler.get_last_lr()[0], run.optimizer.loss_scale.scale])
        return seen

    run, scheduler = made(case, 4.0)
    go_on(run, scheduler, case, range(MIDDLE))
    for number in range(2):
        saving = run.save(f"{folder}/kept/{number}", scheduler, {"at": number}, asynchronous=True, keep_last=1)
    found["wanted"] = go_on(run, scheduler, case, range(MIDDLE, STEPS))
    assert saving is not None
    saving.wait()
    found["kept"] = sorted(path.name for path in Path(folder, "kept").iterdir())
    run, scheduler = made(other, 2.0**10)
    found["extra"] = run.load(f"{folder}/kept/1", scheduler)
    found["resumed"] = go_on(run, scheduler, other, range(MIDDLE, STEPS))
    run = begin(other)
    run.load(f"{folder}/kept/1", states=False)
    found["weights alone"] = run.steps, train_plain(run, other, range(MIDDLE, MIDDLE + 1))[0]
    return found


def dense(folder: str) -> dict[str, Any]:
    """A pruned checkpoint in a dense run, and in a torch optimizer of one process."""
    pruned, other = longer(Case({**grid(gx=2), "samo": {"sparsity": 0.7}}, 1), Case({**grid(gz=2), **OFFLOAD}, 2))
    run = begin(pruned)
    train_plain(run, pruned, range(MIDDLE))
    run.save(folder)
    run = begin(other)
    run.load(folder)
    state = run.optimizer.state_dict()
    assert not any("positions" in one for one in state["state"].values())
    found: dict[str, Any] = {"dense": train_plain(run, other, range(MIDDLE, STEPS))}

    def alone() -> Any:
        model = other.serial()
        optimizer = adamw(model.parameters())
        load(folder, model, None, optimizer)
        save(f"{folder}-torch", model, None, optimizer)
        losses, norms = [], []
        for step in range(MIDDLE, STEPS):
            parts = [ids for micro in other.batches(2)[step] for ids in micro]
            loss = torch.stack([model(ids[:, :-1], ids[:, 1:]) for ids in parts]).mean()
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), other.clip).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, norms

    found["one process"] = made_once(alone)
    run = begin(other)
    run.load(f"{folder}-torch")
    found["back from torch"] = train_plain(run, other, range(MIDDLE, STEPS))
    return found


def halves(folder: str) -> list[str]:
    """Float32 weights of bf16, their moments, and masks: which are other ones on other stages."""

    def made(stage: int, **block: Any) -> Run:
        torch.manual_seed(stage)
        model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5)).bfloat16()
        return compose(model, adamw, {"samo": {"sparsity": 0.5}, **block}, stage=stage)

    def held(run: Run) -> dict[str, Any]:
        state = run.optimizer.state_dict()["state"]
        return {f"{n}.{key}": value for n, one in state.items() for key, value in one.items()}

    run = made(1)
    for step in range(2):
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).bfloat16()
        run.backward(run.model(rows).square().mean())
        run.step()
    run.save(folder)
    wanted = held(run)
    other = made(2, offload_optimizer={})
    other.load(folder)
    found = held(other)
    assert found.keys() == wanted.keys() and any(key.endswith("master") for key in found)
    same = all(torch.equal(a, b) for a, b in zip(run.model.parameters(), other.model.parameters(), strict=True))
    return [key for key in wanted if not torch.equal(found[key].cpu(), wanted[key].cpu())] + ["weights"] * (not same)


def rolled_back(folder: str) -> list[list[float]]:
    """Weights behind a step that follows a checkpoint, and behind one that goes back to it from within another step."""
    found = []
    for stage in (0, 1, 2):
        torch.manual_seed(stage)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        run = compose(model, adamw, grid(gz=2), stage=stage)
        rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(stage), dtype=torch.float64)
        run.save(f"{folder}/{stage}")
        for spoiled in (False, True):
            run.load(f"{folder}/{stage}")
            if spoiled:
                run.backward(run.model(run.mesh.shard_batch(rows * 1e3)).square().mean())
                run.load(f"{folder}/{stage}")
            run.backward(run.model(run.mesh.shard_batch(rows)).square().mean())
            run.step()
            found.append([value for one in run.model.parameters() for value in one.flatten().tolist()])
    return found


def regrown(folder: str) -> list[list[float]]:
    """A regrowth that gradients without an end have put off is made behind the checkpoint."""
    regrow = {"interval": 2, "end_step": 9, "fraction": 0.5}
    case = Case({**grid(gx=2), "samo": {"sparsity": 0.6, "regrow": regrow}}, 1, steps=STEPS)
    run = begin(case, loss_scale="dynamic")
    train_plain(run, case, range(MIDDLE))
    run.optimizer.loss_scale.scale = float("inf")  # type: ignore[union-attr]
    train_plain(run, case, range(MIDDLE, MIDDLE + 1))
    assert run.optimizer.overflow
    run.optimizer.loss_scale.scale = 1.0  # type: ignore[union-attr]
    run.save(folder)
    found = [train_plain(run, case, range(MIDDLE + 1, STEPS))[0]]
    other = Case({**grid(gz=2), **{"samo": case.block["samo"]}}, 2, steps=STEPS)
    run = begin(other, loss_scale="dynamic")
    run.load(folder)
    return [*found, train_plain(run, other, range(MIDDLE + 1, STEPS))[0]]


def snipped(folder: str) -> list[list[float]]:
    """Of the batches whose gradients say what is pruned some come before the checkpoint, and the others behind it."""
    snip = {"samo": {"sparsity": 0.6, "pruner": {"snip": {"batches": MIDDLE + 1}}}}
    case, other = longer(Case({**grid(gx=2), **snip}, 1), Case({**grid(gz=2), **snip}, 2))
    run = begin(case)
    train_plain(run, case, range(MIDDLE))
    run.save(folder)
    found = [train_plain(run, case, range(MIDDLE, STEPS))[0]]
    run = begin(other)
    run.load(folder)
    return [*found, train_plain(run, other, range(MIDDLE, STEPS))[0]]


def frozen(folder: str) -> list[Any]:
    """The masks of a run, and what is left of them behind one in which a pruned layer, with a kept weight of 0, is frozen."""

    def made(freeze: bool, given: bool = False) -> Run:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()
        model[0].requires_grad_(not freeze)
        parameters = list(model.parameters()) if given else None
        return compose(model, adamw, {**grid(gz=2), "samo": {"sparsity": 0.5}}, parameters=parameters)

    def masks(run: Run) -> dict[str, list[bool]]:
        pruning: Any = run._composition.pruning
        return {name: mask.flatten().tolist() for name, mask in pruning.masks(run.optimizer).items()}

    runs = [made(False), made(True), made(True, given=True), made(False)]
    with torch.no_grad():
        next(runs[0].model.parameters()).zero_()
    found = [masks(runs[0])]
    for place, run in enumerate(runs):
        if place:
            run.load(f"{folder}/{place - 1}", states=False)
            found.append(masks(run))
        run.save(f"{folder}/{place}")
    return found


def refused(folder: str) -> dict[str, Any]:
    """Sentences, and whether a run that was refused is as it was."""
    case = Case({**grid(gx=2), "samo": {"sparsity": 0.7}})
    run = begin(case)
    run.save(f"{folder}/one")
    before = [p.detach().clone() for p in run.model.parameters()]
    sgd = compose(built(case), partial(torch.optim.SGD, lr=1.0), case.block)
    wider = compose(nn.Linear(3, 3).double(), adamw, {})
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1.0)
    run.save(f"{folder}/four", torch.optim.lr_scheduler.ConstantLR(run.optimizer, 1.0))
    found = {
        "another optimizer": attempt(sgd.load, f"{folder}/one"),
        "another model": attempt(wider.load, f"{folder}/one"),
        "no scheduler": attempt(run.load, f"{folder}/one", scheduler),
        "another scheduler": attempt(run.load, f"{folder}/four", scheduler),
        "nothing there": attempt(run.load, f"{folder}/two"),
        "keeps none": attempt(partial(run.save, f"{folder}/one", keep_last=0)),
        "the current folder": attempt(run.save, ""),
        "by axonn_tp": attempt(save, f"{folder}/three", run.model, run.mesh, run.optimizer),
    }
    after = [p.detach() for p in run.model.parameters()]
    found["as it was"] = all(map(torch.equal, before, after)) and all(
        map(torch.equal, before, (p.detach() for p in sgd.model.parameters()))
    )
    dist.barrier()
    if dist.get_rank() == 0:
        file = max(Path(folder, "one").glob("*.distcp"), key=lambda file: file.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    dist.barrier()
    return found | {"damaged": attempt(run.load, f"{folder}/one")}


def everything(folder: str, moves: dict[str, tuple[Case, Case]]) -> dict[str, Any]:
    ready(staged=False)
    found = {name: attempt(moved, f"{folder}/{name}", *longer(*pair)) for name, pair in moves.items()}
    for function in (under_deepspeed, schedules, dense, halves, rolled_back, regrown, snipped, frozen, refused):
        found[function.__name__] = attempt(function, f"{folder}/{function.__name__}")
    return found


def longer(*cases: Case) -> list[Case]:
    return [Case(case.block, case.stage, case.experts, steps=STEPS) for case in cases]


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(everything, 4, str(tmp_path_factory.mktemp("plain")), chosen(request, MOVES))


def of(ranks: list[dict[str, Any]], name: str) -> Any:
    found = ranks[0][name]
    assert not isinstance(found, str), found
    return found


@pytest.mark.parametrize("name", names(MOVES, EVERY_RUN))
def test_moves(ranks: list[dict[str, Any]], name: str) -> None:
    found, wanted, serial = of(ranks, name)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=CLOSE)
    if "schedule" not in str(MOVES[name]):  # which the loop of one process does not know
        assert found[0] == pytest.approx(serial[0], rel=CLOSE)
    assert name != "the same" or found == wanted


def test_from_and_to_deepspeed(ranks: list[dict[str, Any]]) -> None:
    found = of(ranks, "under_deepspeed")
    losses, norms = found["wanted"]
    assert found["losses"] == pytest.approx(losses, rel=CLOSE) and found["norms"] == pytest.approx(norms, rel=CLOSE)
    assert found["extra"] == ({"seen": 2}, {"seen": 4}) and found["counts"] == (4, 4 * 16, 0)


def test_schedule_scale_and_the_rest(ranks: list[dict[str, Any]]) -> None:
    found = of(ranks, "schedules")
    assert found["extra"] == {"at": 1} and found["kept"] == ["1"]
    for ours, theirs in zip(found["resumed"], found["wanted"], strict=True):
        assert ours == pytest.approx(theirs, rel=CLOSE)
    assert [step[-1] for step in found["wanted"]] == [32.0, 64.0, 128.0]
    assert found["weights alone"] == (0, [pytest.approx(found["wanted"][0][0], rel=CLOSE)])


def test_a_pruned_one_is_read_dense_and_by_torch(ranks: list[dict[str, Any]]) -> None:
    found = of(ranks, "dense")
    for name in ("dense", "back from torch"):
        for ours, theirs in zip(found[name], found["one process"], strict=True):
            assert ours == pytest.approx(theirs, rel=CLOSE)


def test_gradients_of_before_a_load_are_forgotten(ranks: list[dict[str, Any]]) -> None:
    """They are of other weights than those that were read."""
    for rank in ranks:
        found = rank["rolled_back"]
        assert len(found) == 6 and found[::2] == found[1::2]


def test_a_regrowth_that_was_put_off_is_made(ranks: list[dict[str, Any]]) -> None:
    wanted, resumed = of(ranks, "regrown")
    assert resumed == pytest.approx(wanted, rel=CLOSE)


def test_first_gradients_of_before_a_checkpoint_count(ranks: list[dict[str, Any]]) -> None:
    wanted, resumed = of(ranks, "snipped")
    assert resumed == pytest.approx(wanted, rel=CLOSE)


def test_masks_of_what_is_frozen_are_kept(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        first, *others = rank["frozen"]
        assert others == [first] * 3 and any(first["0.weight"]) and not all(first["0.weight"])


def test_float32_weights_go_on_bit_by_bit(ranks: list[dict[str, Any]]) -> None:
    assert [rank["halves"] for rank in ranks] == [[]] * 4


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("another optimizer", ["AdamW", "SGD", "use the same"]),
        ("another model", ["model.weight"]),
        ("no scheduler", ["without a scheduler"]),
        ("another scheduler", ["ConstantLR", "LambdaLR", "use the same"]),
        ("nothing there", ["does not exist"]),
        ("keeps none", ["keep_last = 0"]),
        ("the current folder", ["would take the place of the folder that the process runs in"]),
        ("by axonn_tp", ["run.save(folder)", "run.load(folder)"]),
        ("damaged", [".distcp, which holds"]),
    ],
)
def test_refused_on_all_ranks(ranks: list[dict[str, Any]], what: str, words: list[str]) -> None:
    messages = {of([rank], "refused")[what].partition("\n")[0] for rank in ranks}
    assert len(messages) == 1
    error, _, message = messages.pop().partition(": ")
    assert error == ("ValueError" if what == "keeps none" else CheckpointError.__name__)
    assert one_sentence(message) and all(word in message for word in words), message


def test_what_does_not_fit_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    assert of(ranks, "refused")["as it was"]
