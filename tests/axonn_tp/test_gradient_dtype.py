"""Gradients of bfloat16 parameters summed and accumulated in float32: as near to exact as the serial model with float32 `.grad`."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import axonn_tp
from axonn_plugins.observe.ledger import Ledger
from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_tp import GradientReducer, Grid, LayerPlan, Mesh, Options, Placement, place
from tests.axonn_tp.test_grids import gpt_plan, whole
from tests.distributed import made_once, run_ranks
from tests.matrix import thorough

CONFIG = GPTConfig(vocabulary=32, context=4, layers=1, heads=4, hidden=16)
BATCH, MICRO_BATCHES = 8, 64
GRIDS = (Grid(2, 1, 2, 1), Grid(1, 2, 1, 2), Grid(1, 1, 4, 1))
PLAN = {"0": LayerPlan("normal"), "2": LayerPlan("transposed")}


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def gradients(model: nn.Module, mesh: Mesh | None = None) -> dict[str, Tensor]:
    """Sums over all micro-batches, of which every one pulls to the same side, so that small addends meet large sums."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(MICRO_BATCHES):
        rows = torch.rand(BATCH, 8, generator=generator).to(model[0].weight.dtype)
        model(rows if mesh is None else mesh.shard_batch(rows)).sub(3).square().mean().backward()
    if mesh is None:
        return {name: p.grad.double() for name, p in model.named_parameters()}
    axonn_tp.sync_gradients(model.parameters(), mesh)
    return {name: whole(p, p.grad.double(), mesh) for name, p in model.named_parameters()}


def serial_gradients(dtype: torch.dtype, accumulated_in: torch.dtype) -> dict[str, Tensor]:
    model = mlp().to(dtype)
    for parameter in model.parameters():
        parameter.grad_dtype = accumulated_in
    return gradients(model)


def ours(mesh: Mesh, options: Options) -> dict[str, Tensor]:
    model = axonn_tp.parallelize(mlp().bfloat16(), mesh, PLAN, options)
    found = gradients(model, mesh)
    wanted = torch.float32 if options.gradient_dtype else torch.bfloat16
    assert {p.grad.dtype for p in model.parameters()} == {wanted}
    return found


def distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Relative, over all parameters."""
    off = sum((found[name] - value).square().sum() for name, value in exact.items())
    return (off / sum(value.square().sum() for value in exact.values())).sqrt().item()


def distances(grids: tuple[Grid, ...]) -> dict[str, dict[str, float]]:
    # What float32 accumulation leaves is the rounding of each micro-batch's gradient, which the serial model has too.
    exact, wide, narrow = made_once(
        lambda: (
            serial_gradients(torch.float64, torch.float64),
            serial_gradients(torch.bfloat16, torch.float32),
            serial_gradients(torch.bfloat16, torch.bfloat16),
        )
    )
    found = {"serial": {"float32": distance(wide, exact), "bfloat16": distance(narrow, exact)}}
    for grid, overlap in (*((grid, False) for grid in grids), (GRIDS[-1], True)):
        mesh = Mesh(grid)
        how = {"overlap_reduce_scatter": overlap, "overlap_all_gather": overlap, "reshard_after_forward": overlap}
        got = ours(mesh, Options(gradient_dtype="float32", **how))
        found[f"{grid} {overlap}"] = {
            "float32": distance(got, exact),
            "bfloat16": distance(ours(mesh, Options(**how)), exact),
            "off the serial model": distance(got, wide),
        }
    return found


@pytest.mark.parametrize("grids", [GRIDS[1:2], thorough(GRIDS)], ids=["some", "all"])
def test_accumulation_in_float32(grids: tuple[Grid, ...]) -> None:
    """One without overlap, and one with."""
    for found in run_ranks(distances, 4, grids):
        serial = found.pop("serial")
        assert serial["float32"] < serial["bfloat16"] / 3
        for grid, ours in found.items():
            assert ours["float32"] < ours["bfloat16"] / 3, (grid, ours)
            assert ours["float32"] < 1.5 * serial["float32"], (grid, ours, serial)
            assert ours["off the serial model"] < torch.finfo(torch.bfloat16).eps, (grid, ours)


def sent(placements: list[Placement], grid: Grid, rows: int, dtype: torch.dtype) -> dict[tuple, Fraction]:
    """Bytes of a pass over z, by operation."""
    found: dict[tuple, Fraction] = {}
    for placement in placements:
        for collective in placement.collectives(CONFIG.context if placement.name == "positions" else rows, grid):
            if collective.axis == "z":
                key = (collective.op, placement.options.itemsize(collective, dtype))
                found[key] = found.get(key, Fraction(0)) + collective.sent * key[1]
    return found


def bytes_over_z(chosen: str | None, autocast: bool) -> tuple[dict, dict]:
    mesh, options = Mesh.create(1, 2, 2), Options(gradient_dtype=chosen)
    torch.manual_seed(1)
    model = GPT(CONFIG) if autocast else GPT(CONFIG).bfloat16()
    plan = {name: layer for name, layer in gpt_plan(CONFIG.heads).items() if not autocast or layer.kind != "embedding"}
    plan = {name: layer for name, layer in plan.items() if not autocast or layer.kind != "norm"}
    placements = place(model, mesh.grid, plan, options)
    rows = BATCH // 2 * CONFIG.context
    counted = sent(placements, mesh.grid, rows, torch.bfloat16)
    axonn_tp.parallelize(model, mesh, plan, options)
    part = mesh.shard_batch(torch.randint(CONFIG.vocabulary, (BATCH, CONFIG.context + 1)))
    with Ledger(mesh.axis_names()) as ledger:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(part[:, :-1], part[:, 1:])
        loss.backward()
    seen: dict[tuple, Fraction] = {}
    for entry in ledger.entries:
        if entry.collective.axis == "z":
            key = (entry.collective.op, entry.itemsize)
            seen[key] = seen.get(key, Fraction(0)) + entry.sent
    return seen, counted


def every_case() -> list[tuple[dict, dict]]:
    return [bytes_over_z(chosen, autocast) for chosen in (None, "float32") for autocast in (False, True)]


def test_the_sum_over_z_takes_the_bytes_that_are_counted() -> None:
    for found in run_ranks(every_case, 4):
        for number, (seen, counted) in enumerate(found):
            assert seen == counted
            assert {op: size for op, size in seen} == {"all_gather": 2, "reduce_scatter": 4 if number >= 2 else 2}
        narrow, wide = found[0][0], found[2][0]
        assert wide["reduce_scatter", 4] == 2 * narrow["reduce_scatter", 2]


class Unused(nn.Module):
    """One of its layers gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).sum()


def step_and_errors() -> None:
    sparse_and_complex()
    mesh, options = Mesh.create(1, 1, 2), Options(gradient_dtype="float32")
    model = axonn_tp.parallelize(Unused().bfloat16(), mesh, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4, dtype=torch.bfloat16)).backward()
    axonn_tp.sync_gradients(model.parameters(), mesh)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    axonn_tp.clip_grad_norm_(model.parameters(), mesh, 0.5)
    optimizer.step()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    double = axonn_tp.parallelize(nn.Linear(4, 4).double(), mesh, options=options)
    double(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert double.weight.grad.dtype == torch.float64
    late = axonn_tp.parallelize(nn.Linear(4, 4), mesh, options=options).bfloat16()
    late(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    assert late.weight.grad.dtype == torch.float32
    dist.barrier()


class SparseAndComplex(nn.Module):
    """An embedding with sparse gradients, a complex scale that the first samples meet, and one that none do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True, dtype=torch.float64)
        self.scale, self.unused = (nn.Parameter(torch.randn(4, dtype=torch.complex128)) for _ in range(2))

    def forward(self, words: Tensor, scaled: bool) -> Tensor:
        out = self.words(words)
        return ((out * self.scale).abs() if scaled else out).square().mean()


def sparse_and_complex() -> None:
    """Sums of sparse gradients, and of complex ones that some ranks or none have."""
    mesh, rank = Mesh.create(), dist.get_rank()
    torch.manual_seed(0)
    words = torch.randint(10, (2, 2, 6))
    serial, synced, reduced = made = [SparseAndComplex() for _ in range(3)]
    for model in made:
        model.load_state_dict(serial.state_dict())
    reducer = GradientReducer(reduced.parameters(), mesh)
    for step in words:
        for model in made:
            model.zero_grad()
        (sum(serial(share, number == 0) for number, share in enumerate(step)) / 2).backward()
        for model in (synced, reduced):
            model(step[rank], rank == 0).backward()
        axonn_tp.sync_gradients(synced.parameters(), mesh)
        reducer.finish()
        for model in (synced, reduced):
            assert model.unused.grad is None
            assert torch.allclose(model.scale.grad, serial.scale.grad, rtol=1e-12)
            assert torch.allclose(model.words.weight.grad, serial.words.weight.grad.to_dense(), rtol=1e-12)


def test_a_step_and_other_types() -> None:
    run_ranks(step_and_errors, 2)


def test_other_values_are_refused() -> None:
    with pytest.raises(ValueError, match='gradient_dtype = "?\'?bf16\'? is not known; use "float32" or None'):
        Options(gradient_dtype="bf16")
