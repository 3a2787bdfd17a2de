"""The engine beside its arithmetic: overflows, samplers, inputs and labels that differ, odd modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.deepspeed.scripts import one_sentence
from tests.deepspeed.training import Case, attempt, config_of, serial, start, train
from tests.distributed import run_ranks
from tests.matrix import asked, names, thorough

GRIDS = {"gx2gz2": (2, 1, 2), "gx2gdata2": (2, 1, 1), "gz2gdata2": (1, 1, 2), "gx2gy2": (2, 2, 1)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.fc2(torch.tanh(self.fc1(x))), y)


def case(grid: str, **changes: Any) -> Case:
    return Case(Net, lambda: (torch.randn(8, 16), torch.randn(8, 8)), GRIDS[grid], **changes)


def own(engine: Any) -> list[list[float]]:
    return [p.detach().double().flatten().tolist() for p in engine.module.parameters()]


def overflow(grid: str, stage: int) -> dict[str, Any]:
    """The third step overflows on the last rank alone."""
    scaling = {"enabled": True, "initial_scale_power": 7, "hysteresis": 1, "loss_scale_window": 1000}
    run = case(grid, stage=stage, dtype="fp16", extra={"fp16": scaling}, clip=0.3, steps=STEPS_OF_OVERFLOWS)
    engine = start(run)
    scale = lambda: float(engine.optimizer.cur_scale)  # noqa: E731
    found: dict[str, Any] = {"before": train(engine, run.batches()[:2]), "scales": [scale()]}
    weights = own(engine)
    for micro in run.batches()[2]:
        loss = engine(*(engine.mesh.shard_batch(t) for t in micro))
        engine.backward(loss * float("inf") if engine.mesh.rank("batch") == engine.mesh.size("batch") - 1 else loss)
        engine.step()
    found["kept"] = own(engine) == weights
    found["scales"].append(scale())
    found["skipped"] = engine.skipped_steps
    found["after"] = train(engine, run.batches()[3:])
    found["scales"].append(scale())
    return found


STEPS_OF_OVERFLOWS = 5  # two after the one that overflows: the second one's loss shows what the first did
OVERFLOWS = {f"{grid}-{stage}": (grid, stage) for grid in ("gx2gz2", "gx2gdata2", "gz2gdata2") for stage in (0, 1, 2)}
EVERY_RUN = ("gz2gdata2-2",)


def all_overflows(chosen: list[str]) -> dict[str, Any]:
    return {name: attempt(overflow, *OVERFLOWS[name]) for name in chosen}


SAMPLED_ON = ("gx2gz2", "gz2gdata2")
"""In every run: two ranks that read the same, and four that read different samples."""
SAMPLED = [(drop, length) for drop in (False, True) for length in (24, 23)]


def sampled(grid: str) -> dict[tuple[bool, int], dict[str, Any]]:
    """Samples that each rank reads in two epochs through loaders built before and after initialize, and through DeepSpeed's own."""
    data = {length: TensorDataset(torch.arange(float(length))) for _, length in SAMPLED}
    early = {(drop, length): DistributedSampler(data[length], shuffle=True, drop_last=drop) for drop, length in SAMPLED}
    loaders = {kind: DataLoader(data[kind[1]], batch_size=2, sampler=sampler) for kind, sampler in early.items()}
    engine = start(case(grid))
    found = {}
    for (drop, length), before in early.items():
        loader = loaders[drop, length]
        after = DistributedSampler(data[length], shuffle=False, drop_last=drop)
        told: dict[str, Any] = {"before": [], "lengths": (len(before), len(loader)), "at": engine.mesh.coordinates}
        for epoch in range(2):
            before.set_epoch(epoch)
            told["before"].append([value for (batch,) in loader for value in batch.tolist()])
        told["after"] = [data[length][i][0].item() for i in after]
        own_loader = engine.deepspeed_io(data[length], batch_size=1)
        told["deepspeed"] = [value for (batch,) in own_loader for value in batch.tolist()]
        found[drop, length] = told
    engine.destroy()
    return found


def all_sampled(grids: list[str]) -> dict[str, Any]:
    return {grid: attempt(sampled, grid) for grid in grids}


def inputs_differ(grid: str) -> dict[str, Any]:
    """Ranks of x and y bring other random inputs, with other shapes; those of the first must be used."""
    run = case(grid)
    gx, gy, gz = run.grid
    run.extra = {"axonn": {"tensor_parallel": {"gx": gx, "gy": gy, "gz": gz, "broadcast_inputs": True}}}
    engine = start(run)
    steps = []
    first = engine.mesh.rank("model") == 0
    for step in run.batches():
        steps.append(
            [micro if first else tuple(torch.randn(t.shape[0] + 4, t.shape[1]) for t in micro) for micro in step]
        )
    return train(engine, steps)


def labels_differ(grid: str) -> str:
    engine = start(case(grid))
    x, y = (engine.mesh.shard_batch(t) for t in case(grid).batches()[0][0])
    try:
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(x, y) * (1 + engine.mesh.rank("x")))
            engine.step()  # the last tells the others what ranks of x and y have found
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


INPUTS_ON = ("gx2gz2", "gx2gy2")


def all_inputs(grids: list[str]) -> dict[str, Any]:
    return {grid: (attempt(inputs_differ, grid), attempt(labels_differ, grid)) for grid in grids}


def lazy(ready: bool) -> Any:
    run = case("gx2gz2")
    model = run.model()
    torch.manual_seed(2)
    model.fc1 = nn.LazyLinear(12)
    if ready:
        model.fc1(torch.randn(2, 16))
    reference = copy.deepcopy(model)
    engine = start(run, model)
    got = train(engine, run.batches())
    run.build = lambda: reference
    return got, serial(run)


def dropout() -> list[float]:
    """Replicas of x and y must draw the same masks, whatever their seeds were."""
    model = nn.Sequential(nn.Linear(16, 12), nn.Dropout(0.5), nn.Linear(12, 8))
    torch.manual_seed(dist.get_rank())
    engine = start(case("gx2gz2"), model)
    return engine(torch.ones(2, 16)).flatten().tolist()


def schedulers(stage: int) -> Any:
    """DeepSpeed's own scheduler on groups that were split for z."""
    extra = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 3}}}
    run = case("gx2gz2", stage=stage, extra=extra)
    engine = start(run)
    rates = []
    for step in run.batches():
        train(engine, [step])
        rates.append([group["lr"] for group in engine.optimizer.param_groups])
    return rates, config_of(run)["optimizer"]["params"]["lr"]


def penalty(stage: int, name: str = "gx2gz2", power: int = 2) -> str:
    """Weights' norms, or their squares, added to the loss outside of the model."""
    run = case(name, stage=stage)
    engine = start(run)
    loss = engine(*(engine.mesh.shard_batch(t) for t in run.batches()[0][0]))
    penalty = sum(parameter.norm() ** power for parameter in engine.module.parameters())
    try:
        engine.backward(loss + 1e-4 * penalty)
    except ValueError as error:
        return str(error)
    return "no error"


def unscaled() -> str:
    """A script's own backward of a loss that the engine has not scaled, whose gradients it would divide by the scale."""
    run = case("gx2gz2", stage=1, dtype="fp16", scale=64.0)
    engine = start(run)
    loss = engine(*(engine.mesh.shard_batch(t) for t in run.batches()[0][0]))
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def odd_things(penalties: list[int], scheduled: list[int]) -> dict[str, Any]:
    found = {f"lazy-{ready}": attempt(lazy, ready) for ready in (False, True)}
    found["dropout"], found["unscaled"] = attempt(dropout), attempt(unscaled)
    found["norms and squares"] = [attempt(penalty, 1, "gx2gdata2", power) for power in (1, 2)]
    found |= {f"scheduler-{stage}": attempt(schedulers, stage) for stage in scheduled}
    return found | {f"penalty-{stage}": attempt(penalty, stage) for stage in penalties}


def everything(wanted: dict[str, list[Any]]) -> dict[str, Any]:
    return {
        "overflow": all_overflows(wanted["overflowing"]),
        "sampler": all_sampled(wanted["sampled_on"]),
        "inputs": all_inputs(wanted["inputs_on"]),
        "odd": odd_things(wanted["penalty_at"], wanted["scheduled_at"]),
    }


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    parts = ("overflowing", "sampled_on", "inputs_on", "penalty_at", "scheduled_at")
    wanted = {part: sorted(value for (value,) in asked(request, part) if value is not None) for part in parts}
    return run_ranks(everything, 4, wanted)


def of(ranks: list[dict[str, Any]], what: str) -> dict[str, list[Any]]:
    found = {name: [rank[what][name] for rank in ranks] for name in ranks[0][what]}
    for name, values in found.items():
        for value in values:
            assert not isinstance(value, str), f"{name}: {value}"
    return found


@pytest.mark.parametrize("overflowing", names(OVERFLOWS, EVERY_RUN))
def test_an_overflow_is_skipped_everywhere(overflowing: str, ranks: list[dict[str, Any]]) -> None:
    run = case("gx2gz2", dtype="fp16", clip=0.3, scale=64.0, steps=STEPS_OF_OVERFLOWS)
    kept = [step for number, step in enumerate(run.batches()) if number != 2]
    run.batches = lambda: kept  # type: ignore[method-assign]
    expected = serial(run)
    found = of(ranks, "overflow")[overflowing]
    for rank in found:
        assert rank["kept"] and rank["skipped"] == 1
        assert rank["scales"] == [128.0, 64.0, 64.0], rank["scales"]
        assert rank["after"] == found[0]["after"]
        assert rank["before"]["losses"] + rank["after"]["losses"] == pytest.approx(expected["losses"], rel=2e-3)
        assert rank["before"]["norms"] + rank["after"]["norms"] == pytest.approx(expected["norms"], rel=1e-3)


@pytest.mark.parametrize(("drop", "length"), SAMPLED)
@pytest.mark.parametrize("sampled_on", names(GRIDS, SAMPLED_ON))
def test_samplers_cover_the_data(sampled_on: str, drop: bool, length: int, ranks: list[dict[str, Any]]) -> None:
    readers: dict[tuple[int, int], Any] = {}
    for rank in (found[drop, length] for found in of(ranks, "sampler")[sampled_on]):
        place = rank["at"]["z"], rank["at"]["data"]
        read = {key: rank[key] for key in ("before", "after", "deepspeed", "lengths")}
        assert readers.setdefault(place, read) == read, "ranks of one x-y plane read other data"
    number = len(readers)
    kept = length // number * number if drop else length
    lists = [[r["before"][0] for r in readers.values()], [r["before"][1] for r in readers.values()]]
    lists += [[r["after"] for r in readers.values()]]
    for parts in lists:
        assert len({len(part) for part in parts}) == 1
        seen = [value for part in parts for value in part]
        assert len(set(seen)) >= kept and len(seen) == -(-kept // number) * number
    assert lists[0] != lists[1]
    seen = [value for r in readers.values() for value in r["deepspeed"]]
    assert len(set(seen)) >= length - number
    for r in readers.values():
        assert r["lengths"][0] == len(r["before"][0]) and r["lengths"][1] == -(-r["lengths"][0] // 2)


@pytest.mark.parametrize("inputs_on", names(INPUTS_ON, ("gx2gy2",)))
def test_inputs_of_the_first_replica_count(inputs_on: str, ranks: list[dict[str, Any]]) -> None:
    expected = serial(case(inputs_on))
    for inputs, _ in of(ranks, "inputs")[inputs_on]:
        assert not isinstance(inputs, str), inputs
        assert inputs["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert inputs["norms"] == pytest.approx(expected["norms"], rel=1e-6)


def test_labels_that_differ_are_refused(ranks: list[dict[str, Any]]) -> None:
    for name, found in of(ranks, "inputs").items():
        for rank, (_, labels) in enumerate(found):
            assert labels.startswith("ConfigError: ") and "labels" in labels, (name, rank, labels)
            assert one_sentence(labels)


def test_lazy_linear(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        refusal = rank["odd"]["lazy-False"]
        assert isinstance(refusal, str) and refusal.startswith("ConfigError: "), refusal
        assert "fc1" in refusal and one_sentence(refusal.splitlines()[0])
        ready = rank["odd"]["lazy-True"]
        assert not isinstance(ready, str), ready
        assert ready[0]["losses"] == pytest.approx(ready[1]["losses"], rel=1e-6)


def test_replicas_draw_the_same_masks(ranks: list[dict[str, Any]]) -> None:
    found = [rank["odd"]["dropout"] for rank in ranks]
    assert not any(isinstance(value, str) for value in found), found[0]
    assert found[0] == found[1] and found[2] == found[3] and found[0] != found[2]


def test_an_unscaled_loss_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert all("engine.scale(loss)" in rank["odd"]["unscaled"] for rank in ranks), ranks[0]["odd"]["unscaled"]


@pytest.mark.parametrize("penalty_at", [thorough(0), 2])
def test_a_penalty_on_shards_is_refused(penalty_at: int, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        refusal = rank["odd"][f"penalty-{penalty_at}"]
        assert refusal.startswith("axonn.tensor_parallel: the loss reads fc") and one_sentence(refusal), refusal
        norms, squares = rank["odd"]["norms and squares"]
        assert "its shard over x and y, by more than a sum over elements" in norms and one_sentence(norms), norms
        assert squares == "no error"


@pytest.mark.parametrize("scheduled_at", [0, thorough(2)])
def test_a_scheduler_of_the_configuration(scheduled_at: int, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        value = rank["odd"][f"scheduler-{scheduled_at}"]
        assert not isinstance(value, str), value
        rates, _ = value
        assert all(len(set(groups)) == 1 for groups in rates)
        assert rates[-1] == pytest.approx([0.1] * len(rates[-1])) and rates[0] != rates[-1]
