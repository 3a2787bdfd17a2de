"""Tensor parallelism inside the stages against a serial run, in float64; checkpoints, mistakes, a rank that is killed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from axonn_plugins.autoload import activate
from axonn_plugins.config import ConfigError, parse
from axonn_plugins.hosts.deepspeed.pipeline.stage_split import _check_pairs, key_of, settings_of, stage_grid
from axonn_plugins.hosts.deepspeed.plan_check import named
from axonn_plugins.pipeline import watch
from axonn_plugins.pipeline.links import StageLost
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.pipeline.losing import stop_or_kill, survivors
from tests.pipeline.training import Case, compare, config, module_of, parameters, plain, ready, start, tied, train

activate()

CLOSE = 1e-10
PAIRS = {"*.up": {"kind": "normal"}, "*.down": {"kind": "transposed"}}


def split(gx: int = 1, gy: int = 1, gz: int = 1, **others: Any) -> dict[str, Any]:
    return {"gx": gx, "gy": gy, "gz": gz, "plan": PAIRS, **others}


CASES: dict[int, dict[str, Case]] = {
    4: {
        "2 stages x (2, 1, 1)": Case(tied, tensor=split(gx=2), clip=0.05, microbatches=6),
        "2 stages x (1, 2, 1)": Case(tied, tensor=split(gy=2, layout="replicated"), clip=0.05, microbatches=3),
        "2 stages x (1, 1, 2)": Case(tied, tensor=split(gz=2), clip=0.05, microbatches=6, block={"pipeline_limit": 2}),
        "self-contained": Case(tensor=split(gx=2, plan={}), microbatches=3),
        "a plan that is found": Case(tensor=split(gx=2, plan="auto"), microbatches=3),
        "1F1B, checkpointed": Case(
            tied,
            tensor=split(gz=2),
            block={"schedule": "1f1b", "activation_checkpointing": "auto"},
            microbatches=3,
        ),
        "one stage": Case(tied, stages=1, tensor=split(2, 1, 2), microbatches=3, clip=0.05),
    },
    8: {
        "2 x (2, 1, 1) x 2": Case(tied, tensor=split(gx=2), clip=0.05, microbatches=3),
        "2 x (1, 2, 1) x 2": Case(tied, tensor=split(gy=2), clip=0.05, microbatches=3),
        "2 x (1, 1, 2) x 2": Case(tied, tensor=split(gz=2), clip=0.05, microbatches=3),
        "2 x (2, 1, 2)": Case(tensor=split(2, 1, 2), clip=0.05, microbatches=4),
        "4 x (2, 1, 1)": Case(lambda: plain(8), stages=4, tensor=split(gx=2), microbatches=5),
    },
}


SOME = ["2 stages x (1, 2, 1)", "self-contained", "a plan that is found", "1F1B, checkpointed", "2 x (1, 2, 1) x 2"]
"""In every run each axis in stages, and one beside data."""


@pytest.mark.parametrize(("ranks", "every"), [(4, False), (8, False), thorough(4, True), thorough(8, True)])
def test_equals_a_serial_run(ranks: int, every: bool) -> None:
    cases = {name: case for name, case in CASES[ranks].items() if every or name in SOME}
    for rank, found in enumerate(run_ranks(compare, ranks, cases)):
        for name, (loss, weight, alive) in found.items():
            assert loss < CLOSE and weight < CLOSE, f"{name} on rank {rank}: {loss}, {weight}"
            assert 1 <= alive <= 2 * CASES[ranks][name].stages, name


def runs(folder: str, half: str) -> dict[str, Any]:
    """Half precision beside float32, a checkpoint, and mistakes."""
    ready()
    found: dict[str, Any] = {}
    for dtype in ("fp32", half):
        case = Case(tied, dtype=dtype, tensor=split(gx=2), clip=0.3, microbatches=3)
        engine = start(case)
        found[dtype] = train(engine, case)
        engine.destroy()
    case = Case(tied, dtype="fp32", tensor=split(gz=2), steps=3)
    engine = start(case)
    train(engine, case, range(1))
    engine.save_checkpoint(folder, tag="half way")
    dist.barrier()
    on, weights = train(engine, case, range(1, 3)), parameters(engine)
    engine.destroy()
    engine = start(case)
    engine.load_checkpoint(folder, tag="half way")
    found["resumed"] = on == train(engine, case, range(1, 3))
    again = parameters(engine)
    found["weights"] = all(torch.equal(weights[name], again[name]) for name in weights)
    engine.destroy()
    engine = start(replace(case, tensor=split()))
    engine.load_checkpoint(folder, tag="half way")
    found["on another grid"] = max(abs(a - b) for a, b in zip(on, train(engine, case, range(1, 3)), strict=True))
    engine.destroy()
    found["groups"] = [goes_on_by_groups(folder, last) for last in (False, True)]
    found["losses"] = [goes_on_with_its_loss(folder, tensor) for tensor in (split(gz=2), None)]
    found["mistakes"] = {name: said(wrong) for name, wrong in MISTAKES.items()}
    found["mistakes"]["fewer layers"] = loaded_into_fewer_layers(folder)
    found["mistakes"]["penalty"] = said_of_a_penalty(lambda weight: weight.norm())
    found["mistakes"]["sum"] = said_of_a_penalty(lambda weight: weight.square().sum())
    return found


def said_of_a_penalty(of: Callable[[Tensor], Tensor]) -> str:
    """The refusal of a loss_fn with a function of weights, of which a rank has shards, and what the other stage hears of it."""
    case = Case(dtype="fp32", tensor=split(gx=2), microbatches=3)
    engine = start(case)
    if engine.is_last_stage():
        weight = engine.module.get_parameter("3.up.weight")
        engine.module.loss_fn = lambda outputs, labels: (outputs - labels).square().mean() + of(weight)
    try:
        train(engine, case, range(1))
    except ConfigError as error:
        return f"itself: {error}" if engine.is_last_stage() else "as if its own"
    except StageLost as error:
        return str(error)
    return "trained"


def loaded_into_fewer_layers(folder: str) -> str:
    """The refusal of a checkpoint of six equal layers, where this run has four."""
    said = ""
    for layers in (6, 4):
        case = Case(lambda count=layers: plain(count), dtype="fp32", tensor=split(gz=2))
        engine = start(case)
        if layers == 6:
            engine.save_checkpoint(folder, tag="layers")
        else:
            with pytest.raises(ConfigError) as refused:
                engine.load_checkpoint(folder, tag="layers", load_optimizer_states=False)
            engine.load_checkpoint(folder, tag="layers", load_optimizer_states=False, load_module_strict=False)
            said = str(refused.value)
        engine.destroy()
    return said


def groups_by_stage(last: bool) -> Any:
    """An engine with a group for the last layer, which the first stage has not; `last`: nor has the last stage the other group."""
    case = Case(lambda: plain(2 if last else 4), dtype="fp32", tensor=split(gz=2), microbatches=2)
    module = module_of(case)
    named = {True: [], False: []}
    for name, parameter in module.named_parameters():
        named[name.startswith("1." if last else "3.")].append(parameter)
    groups = [{"params": named[True], "lr": 0.1, "weight_decay": 0.0}, {"params": named[False], "lr": 0.01}]
    settings = {key: value for key, value in config(case).items() if key != "optimizer"}

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        rates = [0.9 if group["weight_decay"] else 0.5 for group in optimizer.param_groups]
        return torch.optim.lr_scheduler.MultiplicativeLR(optimizer, [lambda _, rate=rate: rate for rate in rates])

    optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings, lr_scheduler=schedule)
    return engine, case


class Scaled(nn.Module):
    """A loss with a weight of its own, and a number that every call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.seen += 1
        return ((outputs - labels) * self.scale.sum()).square().mean()


@dataclass(frozen=True)
class OwnLoss(Case):
    """A run whose loss is trained with the model."""

    @property
    def loss(self) -> Any:
        return Scaled()


def goes_on_with_its_loss(folder: str, tensor: dict[str, Any] | None) -> bool:
    """True if a run goes on from its checkpoint with what its loss_fn has learned."""
    case, ends = OwnLoss(dtype="fp32", optimizer="SGD", microbatches=2, tensor=tensor), []
    for goes_on in (False, True):
        engine = start(case)
        if goes_on:
            engine.load_checkpoint(folder, tag=f"loss {tensor is None}")
        else:
            train(engine, case, range(1))
            engine.save_checkpoint(folder, tag=f"loss {tensor is None}")
        loss = engine.module.loss_fn
        ends.append([*loss.scale.tolist(), loss.seen.item(), *train(engine, case, range(1, 2))])
        engine.destroy()
    return ends[0] == ends[1] and ends[0][3] == 2 and ends[0][0] != 1


def goes_on_by_groups(folder: str, last: bool) -> bool:
    """True if a run goes on from its checkpoint with each group's own options and schedule."""
    engine, case = groups_by_stage(last)
    train(engine, case, range(1))
    engine.save_checkpoint(folder, tag=f"groups {last}")
    dist.barrier()
    train(engine, case, range(2))
    weights, rates = parameters(engine), engine.get_lr()
    engine.destroy()
    engine, _ = groups_by_stage(last)
    engine.load_checkpoint(folder, tag=f"groups {last}")
    train(engine, case, range(2))
    again = parameters(engine)
    same = rates == engine.get_lr() and all(torch.equal(weights[name], again[name]) for name in weights)
    engine.destroy()
    return same


MISTAKES: dict[str, Case] = {
    "sizes": Case(tensor=split(gx=3)),
    "stream": Case(tied, tensor=split(gx=2, plan={"tied_modules.words": {"kind": "embedding"}})),
    "nothing": Case(tensor=split(gx=2, plan={"*.upp": {"kind": "normal"}})),
    "cut": Case(
        layers=lambda: [nn.Linear(8, 8) for _ in range(6)],
        tensor=split(gx=2, plan={"2": {"kind": "normal"}, "3": {"kind": "transposed"}}),
    ),
    "features": Case(
        tensor=split(gx=2, plan={"*.up": {"kind": "normal", "heads": 5}, "*.down": {"kind": "transposed"}})
    ),
    "no parameters": Case(layers=lambda: [nn.Linear(8, 8), nn.Tanh()]),
    "model axis": Case(
        stages=None,  # type: ignore[arg-type]
        tensor=split(gx=2),
        module={
            "topology": lambda: PipeModelDataParallelTopology(1, 4, 1),
        },
    ),
}
WORDS = {
    "sizes": ("axonn.tensor_parallel: gx*gy*gz = 3*1*1 does not divide the 2 ranks of a stage",),
    "stream": ("'tied_modules.words' is embedding", "whole"),
    "nothing": ("'*.upp' matches no layer of any stage",),
    "cut": ("layer 2 and its partner", "move the boundary"),
    "features": ("heads",),
    "no parameters": ("stage 1 of the PipelineModule has no parameters", "use fewer stages"),
    "model axis": ("a model axis of 4", "gx*gy = 2"),
    "penalty": ("axonn.tensor_parallel: the loss reads 3.up.weight outside of its layer",),
    "fewer layers": ("the checkpoint has model.4.", "which the model has not; load it into the model that was saved"),
    "sum": ("axonn.tensor_parallel: loss_fn adds up 3.up.weight", "with this rank's part of that sum alone"),
}


def said(case: Case) -> str:
    case = replace(case, module={k: v() if callable(v) else v for k, v in case.module.items()})
    try:
        start(case)
    except ConfigError as error:
        return str(error)
    return "started"


@pytest.mark.parametrize(("half", "rounding"), [thorough("fp16", 0.02), ("bf16", 0.05)])
def test_precisions_checkpoints_and_mistakes(half: str, rounding: float, tmp_path: Path) -> None:
    for found in run_ranks(runs, 4, str(tmp_path), half):
        assert found[half] == pytest.approx(found["fp32"], rel=rounding)
        assert found["resumed"] and found["weights"] and found["on another grid"] < 1e-5
        assert all(found["groups"]) and all(found["losses"]), found
        for name, words in found["mistakes"].items():
            assert all(word in words for word in WORDS[name]), f"{name}: {words}"
        for told in (found["mistakes"]["penalty"], found["mistakes"]["sum"]):
            assert told.startswith(
                (
                    "itself: ",
                    "stage 1 (rank 2) of the pipeline ended its batch with ConfigError: ",
                    "stage 1 (rank 3) of the pipeline ended its batch with ConfigError: ",
                )
            ), told
    assert (tmp_path / "half way" / "axonn" / "complete").is_file()


def test_sentences_name_ted_where_it_splits_alone() -> None:
    block = parse({"ted": {"tensor": 3}, "pipeline": {}})
    topology = PipeModelDataParallelTopology(2, 1, 4)
    unit: Any = SimpleNamespace(
        topology=lambda: topology,
        world_size=8,
        get_pipe_parallel_world_size=lambda: 2,
        get_slice_parallel_world_size=lambda: 1,
    )
    with pytest.raises(
        ConfigError, match="^axonn.ted.tensor = 3 does not divide the 4 ranks of a stage .* a divisor of 4"
    ):
        stage_grid(settings_of(block), unit, key_of(block))
    with (
        pytest.raises(ConfigError, match="^axonn.ted.tensor = 3: the output of layer 0 .* leave tensor out"),
        named(key_of(block)),
    ):
        raise ConfigError("axonn.tensor_parallel.plan: the output of layer 0 differs; correct the plan")


@pytest.mark.parametrize(
    ("layers", "alone"),
    [
        ("0.up normal, 0.down transposed, 0.gate normal", ""),  # as declared, not as called
        ("0.down transposed, 0.up normal, 1 normal, 2 transposed", ""),
        ("0 normal, 1 transposed, 2 normal", "2"),
        ("1.down transposed, 2 normal, 3 transposed", "1.down"),
    ],
)
def test_half_a_pair_is_told_whatever_the_order_of_declaration(layers: str, alone: str) -> None:
    placements: Any = [SimpleNamespace(name=each.split()[0], kind=each.split()[1]) for each in layers.split(", ")]
    module: Any = SimpleNamespace(stage_id=0)
    with pytest.raises(ValueError, match=f"layer {alone} and") if alone else nullcontext():
        _check_pairs(placements, module)


def rank_is_killed() -> str:
    """The second of the ranks that compute the first stage is killed in the second batch."""
    watch._ANSWER_SECONDS = 4.0  # type: ignore[misc]
    ready()
    case = Case(dtype="fp32", tensor=split(gx=2), microbatches=6)
    engine = start(case)
    train(engine, case, range(1))
    original = engine._backward_microbatch

    def dies(*arguments: Any) -> Any:
        if dist.get_rank() == 1 and arguments[0] == 3:
            stop_or_kill("kill")
        return original(*arguments)

    engine._backward_microbatch = dies
    for _ in range(3):
        train(engine, case, range(1, 2))
    return "went on"


@pytest.mark.thorough  # test_engine.py kills a stage in every run
def test_a_killed_rank_of_a_stage_is_named() -> None:
    (said,) = survivors(rank_is_killed, 4)
    assert set(said) == {0, 2, 3}, said
    assert all(words.startswith("StageLost: stage 0 (rank 1)") for words in said.values()), said
