"""Fabric with the strategy, beside one process in float64."""

from __future__ import annotations

import copy
import errno
import functools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import MixedPrecision, TorchCheckpointIO
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import DeepSpeedStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import DeepSpeedStrategy as TrainersDeepSpeedStrategy
from torchmetrics import SumMetric

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.lightning import AxonnStrategy, files
from axonn_tp import Grid, Mesh, Options
from axonn_tp.checkpoint import CheckpointError
from tests.distributed import run_ranks, same_on_all
from tests.lightning.adversarial import alternating
from tests.lightning.models import Language, groups, loader, loss_of
from tests.matrix import thorough

GRIDS: dict[int, list[dict[str, Any]]] = {
    2: [{"gx": 2}, {"gy": 2}, {"gz": "all"}],
    4: [{"gx": 2, "gz": 2, "options": {"layout": "replicated"}}, {"gx": 2, "gy": 2}, {"gy": 2}, {"gz": "all"}],
}
PLAN = {"up": "normal", "down": "transposed"}


def fabric_of(strategy: Any, precision: Any = "64-true", **named: Any) -> L.Fabric:
    world = dist.get_world_size() if dist.is_initialized() else 1
    fabric = L.Fabric(accelerator="cpu", strategy=strategy, devices=world, precision=precision, **named)
    fabric.launch()
    return fabric


def train(strategy: Any, resume: Path | None = None, save: Path | None = None, empty: bool = False) -> dict[str, Any]:
    """Two batches a step: losses, norms before clipping, gathered samples."""
    fabric = fabric_of(strategy)
    torch.manual_seed(1)
    with fabric.init_module(empty_init=empty):
        model = Language()
    assert next(model.parameters()).is_meta == empty
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    if empty:
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(optimizer)
    else:
        model, optimizer = fabric.setup(model, optimizer)
    batches = fabric.setup_dataloaders(loader(fabric.world_size, shuffle=True))
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
    if resume is not None:
        assert fabric.load(resume, state) == {"rest": 7}
    found: dict[str, list] = {"losses": [], "norms": [], "samples": []}
    for number, ids in enumerate(batches):
        found["samples"].append(sorted(map(tuple, fabric.all_gather(ids).reshape(-1, ids.shape[1]).tolist())))
        if number // 2 < state["step"]:
            continue
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            loss = model(ids, ids)
            fabric.backward(loss / 2)
        found["losses"].append(fabric.all_reduce(loss.detach().clone()).item())
        if number % 2:
            found["norms"].append(fabric.clip_gradients(model, optimizer, max_norm=0.5).item())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            state["step"] += 1
        if save is not None and number == 3:
            fabric.save(save, {**state, "rest": 7})
    weights = model.state_dict()
    return {**found, "weights": sum(tensor.sum().item() for tensor in weights.values()), "names": list(weights)}


@functools.cache
def serial() -> dict[str, Any]:
    return train("auto")


def same(found: dict[str, Any], wanted: dict[str, Any], steps: int = 0) -> None:
    assert found["losses"] == pytest.approx(wanted["losses"][2 * steps :], abs=1e-5)
    assert found["norms"] == pytest.approx(wanted["norms"][steps:], abs=1e-10)
    assert found["weights"] == pytest.approx(wanted["weights"], abs=1e-9)
    assert found["names"] == wanted["names"]
    assert found["samples"] == wanted["samples"]


def every(folder: Path, number_of_grids: dict[int, int]) -> list[Any]:
    world = dist.get_world_size()
    grids = GRIDS[world][: number_of_grids[world]]
    found = [train(AxonnStrategy(**grid), save=folder / f"{world}-{number}") for number, grid in enumerate(grids)]
    if world == 2:
        adversaries = [fabric_of(AxonnStrategy(**grid)) for grid in GRIDS[2]]
        return [*found, *([alternating(fabric, penalty) for penalty in (False, True)] for fabric in adversaries)]
    sharded = folder / "sharded"
    train(AxonnStrategy(gx=2, gz=2, state_dict_type="sharded"), save=sharded)
    assert (sharded / "manifest.json").is_file()
    for nothing in (None, {"step": 0}, torch.optim.SGD([torch.ones(1)])):
        with pytest.raises(
            ConfigError, match='which only a model can take in; pass yours, as in fabric.load.*"model": model'
        ):
            fabric_of(AxonnStrategy(gx=4)).load(sharded, nothing)
    fabric, wider = fabric_of(AxonnStrategy(gx=4)), Language()
    wider.register_buffer("added", torch.zeros(2))
    model = fabric.setup_module(wider)
    with pytest.raises(CheckpointError, match="the checkpoint has no model.added;"):
        fabric.load(sharded, {"model": model})
    assert fabric.load(sharded, {"model": model}, strict=False)["rest"] == 7
    with pytest.raises(ConfigError, match="not the models a, b and no optimizer; use state_dict_type"):
        fabric_of(AxonnStrategy(gx=4, state_dict_type="sharded")).save(sharded, {"a": Language(), "b": Language()})
    resumed = [
        train(AxonnStrategy(gy=2), resume=folder / "2-0"),
        train(AxonnStrategy(gz=4, plan=PLAN), resume=folder / "one"),
        train(AxonnStrategy(gx=4, plan="auto"), resume=sharded),
    ]
    empty = train(AxonnStrategy(gx=2, gz=2), empty=True)
    return [*found, *resumed, empty]


@pytest.mark.parametrize("grids", [{2: 3, 4: 1}, thorough({2: 3, 4: 4})], ids=["some", "all"])
def test_as_one_process_and_resumed_on_other_grids(tmp_path: Path, grids: dict[int, int]) -> None:
    wanted = train("auto", save=tmp_path / "one")
    same(wanted, serial())
    two = run_ranks(every, 2, tmp_path, grids)
    four = run_ranks(every, 4, tmp_path, grids)
    number = grids[4]
    for found in (*two[0][:3], *four[0][:number], *four[1][:number]):
        same(found, wanted)
    alone = [alternating(fabric_of("auto"), penalty) for penalty in (False, True)]
    for found in two[0][3:]:
        assert [*map(pytest.approx, alone)] == found
    *resumed, empty = four[0][number:]
    assert len(resumed) == 3
    for found in resumed:
        same(found, wanted, steps=2)
    same(empty, wanted)
    same(train("auto", resume=tmp_path / "4-0"), wanted, steps=2)


def half_a_file(*given: Any, **named: Any) -> None:
    Path(given[1]).write_text("half")
    raise OSError(errno.ENOSPC, "No space left on device", str(given[1]))


def saved_or_told(folder: Path) -> list[str]:
    """What each rank hears where rank 0 alone writes, and cannot."""
    path, full, said = folder / "a.ckpt", TorchCheckpointIO(), []
    files.save_file(full, {"a": 1}, path)
    files.save_file(full, {"a": 2}, path)
    full.save_checkpoint = half_a_file
    for io, content in ((TorchCheckpointIO(), lambda: 1), (full, 3)):
        with pytest.raises(ConfigError) as told:
            files.save_file(io, {"a": content}, path)
        said.append(str(told.value))
    return said


def test_a_file_is_complete_or_absent(tmp_path: Path) -> None:
    first, second = run_ranks(saved_or_told, 2, tmp_path)
    assert first == second and "lambda" in first[0]
    assert "a.ckpt" in first[1] and "No space left on device; give another, or make room for it" in first[1]
    assert torch.load(tmp_path / "a.ckpt") == {"a": 2} and os.listdir(tmp_path) == ["a.ckpt"]


def refusals() -> list[str]:
    """Refusals, and the rest that one start of ranks is enough for."""
    said: list[str] = []
    fabric = fabric_of(AxonnStrategy(gx=2), "32-true")
    assert (fabric.world_size, fabric.strategy.grid.world) == (1, 2) and isinstance(fabric.strategy, AxonnStrategy)
    model = fabric.setup(Language())
    counted = SumMetric(process_group=fabric.strategy.mesh.group("batch"))
    counted.update(3)
    assert counted.compute() == 3
    for call in (
        lambda: model(torch.full((1, 3), dist.get_rank())),
        lambda: fabric.backward(model(torch.ones(1, 3, dtype=torch.int64)).sum() * (1 + dist.get_rank())),
        lambda: model(torch.ones(1, 3, dtype=torch.int64)).sum().backward(),
        lambda: torch.autograd.grad(model(torch.ones(1, 3, dtype=torch.int64)).sum(), model.up.bias),
        lambda: fabric.clip_gradients(model, torch.optim.SGD(model.parameters()), max_norm=1.0, norm_type=3),
        lambda: fabric.setup(Language(), torch.optim.LBFGS(Language().parameters())),
        lambda: fabric_of(AxonnStrategy(gy=2)).setup(model.module),
    ):
        with pytest.raises((ConfigError, RuntimeError)) as caught:
            call()
        said.append(str(caught.value))
    return said


def precisions() -> None:
    """Precision plugins keep types; an overflow that one rank sees is one for all."""
    for precision, dtype in (("bf16-true", torch.bfloat16), ("bf16-mixed", torch.float32)):
        fabric = fabric_of(AxonnStrategy(gx=2), precision)
        with fabric.init_module():
            model = Language()
        model = fabric.setup(model)
        ids = torch.arange(6).reshape(1, 6)
        loss = loss_of(model(ids), ids)
        fabric.backward(loss)
        assert next(model.parameters()).dtype == dtype and loss.isfinite()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    fabric = fabric_of(AxonnStrategy(gx=2), None, plugins=MixedPrecision("16-mixed", "cpu", scaler))
    model, optimizer = fabric.setup(model := Language(), torch.optim.SGD(model.parameters(), lr=0.1))
    before = [parameter.clone() for parameter in model.parameters()]
    fabric.backward(loss_of(model(ids), ids))
    if dist.get_rank() == 1:
        next(iter(model.module.up.parameters())).grad[0] = torch.inf
    optimizer.step()
    assert fabric.strategy.precision.scaler.get_scale() == 32.0
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def states_by_hand() -> None:
    """State dicts of a Fabric model and of its optimizer, which hold one process' tensors, are taken back by each rank."""
    ids = torch.arange(12).reshape(2, 6)
    for grid in ({"gx": 2}, {"gz": 2}):
        fabric = fabric_of(AxonnStrategy(**grid))
        torch.manual_seed(3)
        model = Language()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        found: list[float] = []
        for step in range(4):
            if step == 1:
                held = same_on_all(copy.deepcopy([model.state_dict(), optimizer.state_dict()]))
            if step == 3:
                model.load_state_dict(held[0])
                optimizer.load_state_dict(held[1])
            for _ in range(2):
                loss = model(ids, ids)
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        assert found[3] == pytest.approx(found[1], rel=1e-12) != found[2]


def on_two() -> list[str]:
    precisions()
    states_by_hand()
    unfrozen()
    return refusals()


def unfrozen() -> None:
    """A layer that is trained later, a sampler of the script's own, and the name "axonn"."""
    fabric = fabric_of("axonn")
    assert (fabric.strategy.grid.gz, fabric.world_size) == (2, 2)
    counted = SumMetric(process_group=fabric.strategy.mesh.group("batch"))
    counted.update(3)
    assert counted.compute() == 6
    dealt = fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.arange(4), shuffle=True)).sampler
    assert isinstance(dealt, torch.utils.data.DistributedSampler) and dealt.shuffle and dealt.num_replicas == 2
    torch.manual_seed(2)
    model, whole = Language().double(), Language().double()
    whole.load_state_dict(model.state_dict())
    model.up.requires_grad_(False)
    split = fabric.setup(model)
    fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    by_hand = [{"params": [p]} for p in model.parameters()]
    fabric.setup_optimizers(torch.optim.AdamW(by_hand))  # no group holds both
    vectors = torch.optim.AdamW([p for p in model.parameters() if p.dim() <= 1])  # leaves out what z does not cut
    for optimizer in (torch.optim.AdamW(groups(model)), vectors):
        with pytest.raises(ConfigError, match="a matrix's shard along z is flat"):
            fabric.setup_optimizers(optimizer)
    split.up.requires_grad_(True)
    ids = torch.arange(12).reshape(2, 6)
    sampler = torch.utils.data.DistributedSampler(ids, fabric.world_size, fabric.global_rank, shuffle=False)
    (mine,) = torch.utils.data.DataLoader(ids, sampler=sampler)
    fabric.backward(loss_of(split(mine), mine))
    loss_of(whole(ids), ids).backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.up.parameters(), 1.0)
    assert fabric.strategy.clip(model.up.parameters(), 1.0).item() == pytest.approx(norm.item(), abs=1e-6)
    assert model.unused.grad is None
    largest = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01, torch.inf)
    assert fabric.strategy.clip(split.up.parameters(), 0.01, torch.inf) <= largest
    fabric.setup_optimizers(torch.optim.SGD(split.parameters(), lr=0.1 * (1 + dist.get_rank())))
    with pytest.raises(ConfigError, match="options of the optimizers, such as the learning rate, are not the same"):
        fabric.backward(loss_of(split(mine), mine))


def test_what_is_refused_is_said_on_every_rank() -> None:
    first, second = run_ranks(on_two, 2)
    assert first == second
    words = (
        "what the model is called with differs",
        "the loss differs",
        "call `fabric.backward(loss)`",
        "call `fabric.backward(loss)`",
        "type 2 or inf",
        "LBFGS",
        "is split on Grid(gx=2",
    )
    for sentence, word in zip(first, words, strict=True):
        assert word in sentence


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"gx": 0}, "AxonnStrategy(gx=0)"),
        ({"gz": "some"}, 'or "all"'),
        ({"plan": "best"}, "AxonnStrategy(plan='best')"),
        ({"plan": {"up": "nomral"}}, "nomral"),
        ({"options": {"layot": "scattered"}}, "use layout"),
        ({"options": {"layout": "else"}}, "layout"),
        ({"state_dict_type": "half"}, "sharded"),
    ],
)
def test_arguments(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AxonnStrategy(**arguments)
    assert said in str(caught.value)


def test_sizes_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="does not divide the 2 ranks"):
        L.Fabric(accelerator="cpu", strategy=AxonnStrategy(gx=3), devices=2)
    options = Options(layout="replicated")
    assert AxonnStrategy(options=options).settings.options is options
    assert AxonnStrategy(options={"bucket_bytes": 0}).settings.options == Options(bucket_bytes=0)
    monkeypatch.setenv("AXONN_STRATEGY", '{"gx": 2}')
    assert L.Fabric(accelerator="cpu", strategy="axonn", devices=2).strategy.grid.gx == 2
    for text, said in (("[1]", "not a JSON object"), ('{"gw": 2}', "use one of gx, gy")):
        monkeypatch.setenv("AXONN_STRATEGY", text)
        with pytest.raises(ConfigError, match=said):
            L.Fabric(accelerator="cpu", strategy="axonn", devices=2)


def test_deepspeed_strategy_deals_out_to_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # environments set it for the whole process
    block = {"axonn": {"tensor_parallel": {"gx": 2}}}
    for config, rank, dealt in (
        (None, 3, (4, 3)),
        ({}, 3, (4, 3)),
        (block, 3, (2, 1)),
        (block, 2, (2, 1)),
        (block, 1, (2, 0)),
    ):
        environment = LightningEnvironment()
        environment.set_global_rank(rank)
        environment.set_world_size(4)
        given = {"config": config, "parallel_devices": [torch.device("cpu")] * 4, "cluster_environment": environment}
        for kind in (DeepSpeedStrategy, TrainersDeepSpeedStrategy):
            found = kind(**given).distributed_sampler_kwargs
            assert (found["num_replicas"], found["rank"]) == dealt


def sums_of_deepspeed_strategies() -> list[Any]:
    engine = SimpleNamespace(mesh=Mesh(Grid(2, 1, 2, 1)))
    found = []
    for kind, where, what in (
        (DeepSpeedStrategy, "_deepspeed_engine", "all_reduce"),
        (TrainersDeepSpeedStrategy, "_model", "reduce"),
    ):
        strategy = kind.__new__(kind)
        vars(strategy)[where] = engine
        value = torch.tensor(float(engine.mesh.rank("batch") + 1))
        found += [
            getattr(strategy, what)(value.clone(), reduce_op="sum").item(),
            strategy.all_gather(value).flatten().tolist(),
        ]
    return found


def test_deepspeed_strategy_sums_over_readers() -> None:
    for found in run_ranks(sums_of_deepspeed_strategies, 4):
        assert found == [3.0, [1.0, 2.0]] * 2
