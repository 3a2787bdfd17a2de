"""A model with MoE layers on any mesh trains what one process with all experts trains, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from axonn_plugins.config import Ted
from axonn_plugins.hosts.common.split_states import split_states
from axonn_plugins.hosts.deepspeed.ted.layers import passing_by
from axonn_plugins.hosts.deepspeed.ted.on_mesh import find_split, split_with_experts
from axonn_recipes.models.gpt import GPT
from axonn_tp import GradientReducer, Grid, Mesh, Options, checkpoint, factorisations, first_difference, sync_gradients
from axonn_tp.grid.layout import Layout
from tests import groups
from tests.axonn_tp.test_exports import refusal
from tests.compose.experts_on_mesh import (
    CONFIG,
    GATES,
    PLAIN,
    REENTRANT,
    Case,
    batches,
    build,
    copied,
    errors,
    expected,
    farthest,
    moe_layers,
    start,
    whole,
)
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks
from tests.matrix import thorough

TOLERANCE = 1e-10
WHOLE = {"expert_tensor_parallel": False}
REPLICATED = Options(layout="replicated")


def sizes_of(grid: Grid, whole: bool) -> Iterator[int]:
    plane = grid.gx * grid.gy
    for size in (1, 2, 4):
        if whole:
            if grid.world % size == 0 and max(size, plane) % min(size, plane) == 0:
                yield size
        elif grid.batch % size == 0:
            yield size


def cases_of(grid: Grid, both_layouts: bool) -> Iterator[Case]:
    """Every ep_size, experts split and whole, each with both layouts or with one; gates, plans and layouts take turns."""
    number = 0
    for layout, options in enumerate((Options(), REPLICATED)):
        chosen = [(ted, size) for ted in ({}, WHOLE) for size in sizes_of(grid, ted is WHOLE)]
        for turn, (ted, size) in enumerate(chosen):
            gate = list(GATES)[number % len(GATES)]
            if both_layouts or turn % 2 == layout:
                yield Case(grid, size, gate, ("stream", "stream", "pairs")[number % 3], options, ted)
            number += 1


OPTIONS = Options(reshard_after_forward=True, regather_inputs=True)
APART = {"duplicate_token_dropping": False, "fused": False}
EVERY_RUN = [
    Case(Grid(2, 1, 2), 2, "k 2, drops, residual", options=OPTIONS, checkpoint=REENTRANT),
    Case(Grid(1, 2, 1, 2), 2, "k 1", options=REPLICATED, checkpoint=PLAIN, stash=True),
    Case(Grid(2, 2), 4, "k 1, drops", ted=WHOLE),
    Case(Grid(2, 1, 1, 2), 2, "k 2", plan="auto", ted=APART),
    Case(Grid(1, 2, 2), 2, "k 2", ted={"dropless": True}),
]
"""Each gate, option, switch, form of checkpoint and axis once."""


def cases(ranks: int, both_layouts: bool) -> list[Case]:
    """Of four ranks those of one layout or of both; of eight those with each option, or the others."""
    if ranks == 4:
        return [case for grid in factorisations(4) for case in cases_of(grid, both_layouts)]
    in_turn = [  # each gate, plan, option, switch, form of checkpoint and axis
        Case(Grid(2, 2, 2), 2, "k 2, drops, residual", options=OPTIONS),
        Case(Grid(2, 1, 2, 2), 4, "k 2", options=OPTIONS, checkpoint=REENTRANT),
        Case(Grid(1, 2, 2, 2), 2, "k 1, drops", options=REPLICATED, checkpoint=PLAIN),
        Case(Grid(2, 2, 2), 4, "k 1, drops", ted=WHOLE, checkpoint=REENTRANT),
        Case(Grid(2, 2, 2), 2, "k 2", ted=APART),
        Case(Grid(1, 2, 2, 2), 4, "k 1", checkpoint=PLAIN, stash=True),
        Case(Grid(2, 2, 2), 2, "k 2", ted={"dropless": True}),
        Case(Grid(4, 1, 1, 2), 2, "k 2", plan="auto"),
    ]
    others = [
        Case(Grid(2, 2, 2), 2, "k 1"),
        Case(Grid(2, 2, 1, 2), 2, "k 2", checkpoint=PLAIN),
        Case(Grid(4, 1, 1, 2), 2, "k 2, drops, residual"),
        Case(Grid(2, 1, 4), 2, "k 2", ted=WHOLE),
        Case(Grid(2, 2, 1, 2), 2, "k 2, drops, residual", checkpoint=REENTRANT, stash=True),
        Case(Grid(2, 2, 2), 2, "k 2", plan="auto"),
        Case(Grid(2, 1, 2, 2), 4, "k 1", plan="auto", options=REPLICATED),
    ]
    return others if both_layouts else in_turn


def all_errors(chosen: list[Case]) -> Any:
    groups.reuse()
    made = {grid: Mesh(grid) for grid in dict.fromkeys(case.grid for case in chosen)}
    return {str(case): attempt(errors, case, made[case.grid]) for case in chosen}


def in_stages(alike: bool) -> Any:
    """Two stages, which split models of their own: with as many experts on a rank or not, then one without experts."""
    groups.reuse()
    grid, found = Grid(2, 1, 2), {}
    mesh, stage = Mesh(grid, stages=2), dist.get_rank() // grid.world
    size = 2 if alike else 1 + stage
    case = Case(grid, size, "k 2, drops, residual", ted={"expert_tensor_parallel": size == 2})
    found[f"{case}, stage {stage}"] = attempt(errors, case, mesh)
    dense = GPT(CONFIG).double()
    made = split_with_experts(dense if stage else build("k 1", 2), mesh)
    return found, made if made is None else made.ranks("expert")


def trained() -> float:
    """Largest difference of weights from one process' after three steps of two passes, sums under way while backward runs."""
    mesh, far = Mesh(Grid(2, 1, 2)), 0.0
    case = Case(mesh.grid, 2, "k 2")
    models = [start(case, mesh), copied(case.gate)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    reducer = GradientReducer(models[0].parameters(), mesh, bucket_bytes=10_000)
    for step in range(3):
        for passes, part in enumerate(batches().roll(step).chunk(2)):
            with reducer.no_sync() if passes == 0 else nullcontext():
                ids = mesh.shard_batch(part)
                models[0](ids[:, :-1], ids[:, 1:]).backward()
            for ids in part.chunk(mesh.grid.batch):
                (models[1](ids[:, :-1], ids[:, 1:]) / mesh.grid.batch).backward()
        reducer.finish()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        wanted = {name: parameter.detach() for name, parameter in models[1].named_parameters()}
        far = max(far, farthest(whole(models[0], mesh, lambda p: p), wanted))
    return far


def verified() -> list[Any]:
    """Findings of the check of a plan: of a right one, with the experts and without them, and of one that cuts heads."""
    mesh, found = Mesh(Grid(2, 2)), []
    ids = batches()[:2, :-1]
    for plan in ("stream", "cuts heads"):
        model = start(Case(mesh.grid, 1, plan=plan), mesh)
        found.append(first_difference(model, lambda model=model: model(ids), mesh, 1e-6))
        with passing_by(model):
            found.append(first_difference(model, lambda model=model: model(ids), mesh, 1e-6))
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh | None, number: int) -> None:
    ids = batches().roll(number)
    ids = ids if mesh is None else mesh.shard_batch(ids)
    for part in ids.chunk(2 if mesh is None else 1):
        (model(part[:, :-1], part[:, 1:]) / (2 if mesh is None else 1)).backward()
    if mesh is not None:
        sync_gradients(model.parameters(), mesh)
    optimizer.step()
    optimizer.zero_grad()


def resumed(folder: str, same: bool) -> dict[str, float]:
    """Largest difference of weights after a step, on other grids or the same, and in one process, from the run that was saved."""
    groups.reuse()
    first = Case(Grid(2, 1, 2), 2, "k 2, drops, residual")
    others = [Case(Grid(1, 2, 1, 2), 1, first.gate), Case(Grid(2, 1, 1, 2), 4, first.gate, ted=WHOLE)]
    others = [first] if same else others
    mesh, far = Mesh(first.grid), {}
    model = start(first, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, mesh, 0)
    checkpoint.save(folder, model, mesh, optimizer)
    step(model, optimizer, mesh, 1)
    wanted = whole(model, mesh, lambda p: p)
    for case in others:
        mesh = Mesh(case.grid)
        model = start(case, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        checkpoint.load(folder, model, mesh, optimizer)
        step(model, optimizer, mesh, 1)
        far[str(case)] = farthest(whole(model, mesh, lambda p: p), wanted)
    if dist.get_rank() == 0:
        serial = copied(first.gate)
        optimizer = torch.optim.AdamW(serial.parameters(), lr=1e-2)
        checkpoint.load(folder, serial, None, optimizer)
        step(serial, optimizer, None, 1)
        far["serial"] = farthest({name: p.detach() for name, p in serial.named_parameters()}, wanted)
    return far


def refused() -> list[str]:
    mesh = Mesh(Grid(2, 1, 2))
    split_already = build("k 1", 2)
    next(moe_layers(split_already)[0].deepspeed_moe.experts.parameters()).tensor_model_parallel = True
    made_for_others = build("k 1", 2)
    for parameter in moe_layers(made_for_others)[0].deepspeed_moe.experts.parameters():
        parameter.data += dist.get_rank() % 2
    here = ValueError("rank 2 alone finds this") if dist.get_rank() == 2 else None
    only_one = build("k 1", 2)
    if here is not None:
        moe_layers(only_one)[0].deepspeed_moe.use_tutel = True
    return [
        refusal(partial(split_with_experts, model, mesh, Ted.model_validate(ted), plan))
        for model, ted, plan in [
            (build("k 1", 4), {}, "auto"),
            (build("k 1", 2), {"tensor": 4}, "auto"),
            (build("k 1", 2), {}, {"*.deepspeed_moe.*.fc1": "normal"}),
            (build("k 1", 2), {}, "automatic"),
            (split_already, {}, {}),
            (made_for_others, {}, {}),
            (only_one, {}, {}),
        ]
    ]


REFUSALS = [
    "ep_size = 4 of the MoE layers does not divide gz*gdata = 2*1 = 2, the ranks that read different data",
    "tensor = 4, but gx*gy = 2*1 = 2 ranks split the dense layers",
    "plan '*.deepspeed_moe.*.fc1' names parts of MoE layers alone",
    "plan = 'automatic' is not a plan",
    "layer blocks.1.moe has experts that are split already (tensor_model_parallel), and gx*gy = 2",
    "the experts' weights are equal on ranks [0, 2], and TED has the same experts on [0, 1], so that experts would be lost; number a rank's experts by "
    "its place in its group of ranks with different experts, of which the first is [0, 2], or load",
    "layer blocks.1.moe has use_tutel = true",
]


@pytest.mark.parametrize(
    ("ranks", "both_layouts"),
    [(4, None), thorough(4, False), thorough(8, False), thorough(8, True), thorough(4, True)],
)
def test_equals_one_process(ranks: int, both_layouts: bool | None) -> None:
    chosen = EVERY_RUN if both_layouts is None else cases(ranks, both_layouts)
    for case in chosen:
        expected(case.gate, case.grid.batch)
    for found in run_ranks(all_errors, ranks, chosen):
        for case, differences in found.items():
            assert not isinstance(differences, str), (case, differences)
            assert max(differences.values()) < TOLERANCE, (case, differences)


@pytest.mark.thorough  # test_pairs.py has both together in every run
@pytest.mark.parametrize("alike", [False, True])
def test_stages_have_experts_of_their_own(alike: bool) -> None:
    expected("k 2, drops, residual", 2)
    for rank, (found, ranks) in enumerate(run_ranks(in_stages, 8, alike)):
        for case, differences in found.items():
            assert not isinstance(differences, str), (case, differences)
            assert max(differences.values()) < TOLERANCE, (case, differences)
        assert ranks == ([rank % 2, rank % 2 + 2] if rank < 4 else None)


@pytest.mark.thorough
def test_several_passes_and_steps() -> None:
    assert max(run_ranks(trained, 4)) < TOLERANCE


def test_refusals() -> None:
    for found in run_ranks(refused, 4):
        for message, expected_words in zip(found, REFUSALS, strict=True):
            assert expected_words in message, (message, expected_words)


def test_whole_experts_must_fit_the_plane() -> None:
    with pytest.raises(ValueError, match="ep_size = 2 of the MoE layers, whose experts expert_tensor_parallel = false"):
        find_split(build("k 1", 2), Grid(3, 1, 2), Ted.model_validate(WHOLE), {})


def test_auto_splits_the_stream_across_experts() -> None:
    split = find_split(build("k 2", 2), Grid(2, 2, 2), Ted.model_validate({}))
    kinds = {name: layer.kind for name, layer in split.plan.items()}
    assert kinds["tokens"] == "embedding" and kinds["blocks.1.ln2"] == "norm" and kinds["head"] == "head"
    assert not split.plan["tokens"].whole_tokens


def test_a_plan_is_verified_with_and_without_experts() -> None:
    for right, passing, wrong, wrong_passing in run_ranks(verified, 4):
        assert right is None and passing is None
        assert wrong[0] == wrong_passing[0] == "blocks.0.attention.proj"


@pytest.mark.parametrize("same", [False, thorough(True)])
def test_a_checkpoint_is_read_on_other_ranks(tmp_path: Path, same: bool) -> None:
    for found in run_ranks(resumed, 4, str(tmp_path / "checkpoint"), same):
        assert max(found.values()) < TOLERANCE, found


def test_states_that_come_with_experts_are_cut_on_their_own_grid() -> None:
    """As Adagrad's, which are there before the first step."""
    weight = nn.Parameter(torch.zeros(4, 3))
    weight.axonn_layout = Layout((8, 3), split=((0, "x"),), grid=Grid(gx=2))  # type: ignore[attr-defined]
    optimizer = torch.optim.Adagrad([weight])
    optimizer.state[weight]["sum"] = torch.arange(24.0).view(8, 3)
    other = SimpleNamespace(grid=Grid(gx=2), coordinates={"x": 1, "y": 0, "z": 0, "data": 0})
    mesh: Any = SimpleNamespace(grid=Grid(gy=2), coordinates={"x": 0, "y": 1, "z": 0, "data": 0}, over=lambda _: other)
    split_states(optimizer, mesh)
    assert torch.equal(optimizer.state[weight]["sum"], torch.arange(12.0, 24.0).view(4, 3))
