"""A tensor that several layers read enters them once: exact, counted, and kept once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import axonn_tp
from axonn_plugins.observe.ledger import Ledger
from axonn_tp import Collective, Grid, LayerPlan, Mesh, Options, auto_plan, place
from tests.axonn_tp.counting import joined_over_z
from tests.axonn_tp.families import FAMILIES
from tests.axonn_tp.test_auto import batch_for
from tests.axonn_tp.test_grids import TOLERANCE, train_one_step
from tests.distributed import meshes, run_ranks
from tests.matrix import thorough

GRIDS = (Grid(2, 2, 1), Grid(1, 2, 2), Grid(4, 1, 1), Grid(1, 4, 1), Grid(2, 1, 2))
HIDDEN = 8


class Readers(nn.Module):
    """Three layers that read one tensor, or not, and one that ends the pair."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, 16, bias=name != "k") for name in "qkv")
        self.out = nn.Linear(16, HIDDEN)
        self.v.requires_grad_(how not in ("without gradient", "one unused"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self.how == "checkpointed":
            return x + checkpoint(self._inner, x, use_reentrant=False)
        if self.how == "reentrant":
            return x + checkpoint(self._inner, x, use_reentrant=True)
        return x + self._inner(x)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.q(x), self.k(2 * x if self.how == "other tensor" else x)
        v = self.v(x)
        if self.how == "without gradient":
            with torch.no_grad():
                v = self.v(x)
        if self.how == "one unused":
            v = torch.ones_like(v)
        if self.how == "called twice":
            v = v + self.v(x)
        return self.out(torch.tanh(q * k) + v)


HOW = (
    "plain",
    "checkpointed",
    "reentrant",
    "other tensor",
    "without gradient",
    "one unused",
    "called twice",
)
PLAN = {
    "first": LayerPlan("self_contained"),
    **dict.fromkeys("qkv", LayerPlan("normal")),
    "out": LayerPlan("transposed"),
}


def penalised(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Twice backward: through a gradient of the input."""
    x = x.clone().requires_grad_()
    value = model(x).square().mean()
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    return value + slope.square().sum(-1).mean() * x.shape[0]


def readers_on_grids(every: bool) -> dict[str, Any]:
    """On two grids in both layouts, or on one, with layouts in turns."""
    found = {}
    batch = torch.randn(4, 6, HIDDEN, dtype=torch.float64)
    for number, grid in enumerate((Grid(2, 2, 1), Grid(4, 1, 1))[: 2 if every else 1]):
        mesh = Mesh(grid)
        for place_of_how, how in enumerate(HOW):
            layouts = (("replicated", True), ("scattered", bool(number % 2)))
            for layout, overlap in layouts if every else layouts[place_of_how % 2 :][:1]:
                options = Options(layout=layout, overlap_all_reduce=overlap, regather_inputs=overlap)
                loss = lambda model, x: model(x).square().mean()  # noqa: E731
                build = lambda how=how: Readers(how)  # noqa: E731
                errors = train_one_step(build, PLAN, loss, (batch,), mesh, options, forwards=2)
                found[f"{grid} {how} {layout}"] = max(errors.values())
                if how == "plain" and grid.batch == 1:
                    errors = train_one_step(build, PLAN, penalised, (batch,), mesh, options)
                    found[f"{grid} twice backward {layout}"] = max(errors.values())
    return found


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_readers_of_one_tensor_equal_serial(every: bool) -> None:
    torch.manual_seed(8)
    for found in run_ranks(readers_on_grids, 4, every):
        assert max(found.values()) < TOLERANCE, {case: e for case, e in found.items() if not e < TOLERANCE}


Plans = list[tuple[Grid, dict[str, LayerPlan]]]


def counted(family: str, plans: Plans) -> list[tuple[str, list[Collective], list[Collective], int]]:
    """Collectives over x, y and z in one pass, counted and as the placements say."""
    found = []
    for mesh, (_, plan) in zip(meshes(grid for grid, _ in plans), plans, strict=False):
        grid = mesh.grid
        for options in (Options(), Options(layout="replicated"), Options(regather_inputs=True))[
            : 3 if grid.gx == 2 else 1
        ]:
            torch.manual_seed(1)
            model = FAMILIES[family][0]().double()
            placements = place(model, grid, plan, options)
            rows = 4 // grid.batch * 8
            wanted = [c for p in placements for c in p.collectives(rows, grid)]
            shared = sum(len(p.readers) > 1 for p in placements)
            axonn_tp.parallelize(model, mesh, plan, options)
            loss_of, batch = batch_for(model)
            batch = tuple(mesh.shard_batch(tensor) for tensor in batch)
            loss_of(model, *batch).backward()
            with Ledger(mesh.axis_names()) as ledger:
                loss_of(model, *batch).backward()
            found.append((f"{grid} {options}", joined_over_z(ledger.collectives), joined_over_z(wanted), shared))
    return found


@pytest.mark.parametrize(("family", "grids"), [("llama", GRIDS[:2]), thorough("llama", GRIDS)], ids=["some", "all"])
def test_the_ledger_sees_what_placements_count(family: str, grids: tuple[Grid, ...]) -> None:
    pytest.importorskip("transformers")
    model = FAMILIES[family][0]().double()
    plans: Plans = [(grid, auto_plan(model, grid)[0]) for grid in grids]
    for case, seen, wanted, shared in run_ranks(counted, 4, family, plans)[0]:
        assert seen == wanted, case
        assert shared, case


def test_who_reads_what_is_inferred_or_said() -> None:
    model = Readers("plain")
    by_name = {p.name: p.readers for p in place(model, Grid(2), PLAN)}
    assert by_name["q"] == by_name["k"] == by_name["v"] == ("q", "k", "v") and not by_name["out"]
    said = {**PLAN, "q": LayerPlan("normal", reads="x"), "[kv]": LayerPlan("normal", reads="memory")}
    del said["k"], said["v"]
    by_name = {p.name: p.readers for p in place(model, Grid(2), said)}
    assert not by_name["q"] and by_name["k"] == by_name["v"] == ("k", "v")
    t5 = FAMILIES["t5"][0]()
    plan, _ = auto_plan(t5, Grid(2))
    crossing = {p.name: p.readers for p in place(t5, Grid(2), plan) if "decoder.block.0.layer.1" in p.name}
    name = "decoder.block.0.layer.1.EncDecAttention"
    assert not crossing[f"{name}.q"] and crossing[f"{name}.k"] == (f"{name}.k", f"{name}.v")
