"""plan="auto" splits the residual stream where a simulation proves it: the same losses, gradients and steps as serial."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import axonn_tp
from axonn_plugins.observe.ledger import Ledger
from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_tp import Collective, Grid, LayerPlan, Mesh, Options, auto_plan, factorisations, place
from axonn_tp.options import LAYOUTS
from tests.axonn_tp.counting import joined_over_z
from tests.axonn_tp.families import FAMILIES
from tests.axonn_tp.test_auto import TOLERANCE, Expected, batch_for, few_steps, serial_steps
from tests.distributed import meshes, run_ranks
from tests.matrix import thorough


def in_own_type() -> Any:
    """HF's RMSNorm rounds to float32 in any model; here it keeps float64, so that the serial model is exact."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

    return mock.patch.object(llama.LlamaRMSNorm, "forward", forward)


def kinds(plan: dict[str, LayerPlan]) -> Counter[str]:
    return Counter(layer.kind for layer in plan.values())


COUNTED = (Grid(2, 2), Grid(1, 2, 2))
SOME = (*COUNTED, Grid(4), Grid(2, 1, 1, 2))
"""Each axis once; the others in a thorough run."""


def trained(
    models: dict[str, nn.Module],
    expected: dict[str, Expected],
    plans: dict[tuple[str, Grid], dict[str, LayerPlan]],
    both: bool,
) -> dict[str, Any]:
    """Errors by model, grid and layout, for two grids with what the ledger saw beside what placements count.

    Layouts take turns, on the grids and on the models, unless both are asked for.
    """
    found: dict[str, Any] = {}
    for turn, mesh in enumerate(meshes(dict.fromkeys(grid for _, grid in plans))):
        grid = mesh.grid
        for place_of_model, (name, model) in enumerate(models.items()):
            plan = plans[name, grid]
            for layout in LAYOUTS if both else (LAYOUTS[(turn + place_of_model) % 2],):
                options = Options(layout=layout)
                parallel = axonn_tp.parallelize(copy.deepcopy(model), mesh, plan, options)
                errors = few_steps(model, expected[name], parallel, mesh)
                found[f"{name} {grid} {layout}"] = (errors, kinds(plan))
                if grid in COUNTED:
                    found[f"{name} {grid} {layout}"] += counted(name, model, parallel, mesh, plan, options)
    return found


def counted(
    name: str, model: nn.Module, parallel: nn.Module, mesh: Mesh, plan: dict[str, LayerPlan], options: Options
) -> tuple[list[Collective], list[Collective]]:
    loss_of, batch = batch_for(model)
    with Ledger(mesh.axis_names()) as ledger:
        loss_of(parallel, *(mesh.shard_batch(tensor) for tensor in batch)).backward()
    rows, wanted = 4 // mesh.grid.batch * 8, []
    for placement in place(model, mesh.grid, plan, options):
        # Positions are looked up once for all sequences.
        of_one = placement.name.endswith(("wpe", "positions"))
        wanted += placement.collectives(8 if of_one else rows, mesh.grid)
    return joined_over_z(ledger.collectives), joined_over_z(wanted)


@pytest.mark.parametrize(
    ("names", "both"),
    [
        (["llama", "ours"], False),
        thorough(["llama", "ours"], True),
        pytest.param(["gpt2", "litgpt"], True, marks=pytest.mark.families),
    ],
)
def test_losses_gradients_and_steps_equal_serial(names: list[str], both: bool) -> None:
    if "litgpt" in names:
        pytest.importorskip("litgpt")
    with in_own_type():
        torch.manual_seed(1)
        models = {name: FAMILIES[name][0]().double() for name in names}
        grids = [grid for grid in factorisations(4) if grid.gx * grid.gy > 1 and (both or grid in SOME)]
        plans = {(name, grid): auto_plan(model, grid)[0] for grid in grids for name, model in models.items()}
        expected = {name: serial_steps(model) for name, model in models.items()}
        ranks = run_ranks(trained, 4, models, expected, plans, both)
    for rank in ranks:
        for case, (errors, found, *counts) in rank.items():
            assert errors["loss"] < TOLERANCE and errors["gradients"] < TOLERANCE, (case, errors)
            if "gy=1" not in case:
                assert found["embedding"] and found["norm"] == 5 and found["head"] == 1, (case, found)
            if counts:
                assert counts[0] == counts[1], case


def test_the_report_says_how_the_stream_is_split() -> None:
    pytest.importorskip("transformers")
    build = FAMILIES["llama"][0]
    plan, report = auto_plan(build(), Grid(2, 2))
    assert "features over y but all tokens on every x (" in report.note
    assert plan["model.embed_tokens"] == LayerPlan("embedding", whole_tokens=True)
    assert plan["lm_head"].kind == "head" and plan["model.norm"].kind == "norm"
    before = {name: layer for name, layer in plan.items() if layer.kind in ("normal", "transposed")}
    model = build()
    bytes_sent = [
        sum(c.sent for p in place(model, Grid(2, 2), chosen) for c in p.collectives(64, Grid(2, 2)))
        for chosen in (plan, before)
    ]
    assert bytes_sent[0] < bytes_sent[1]
    _, report = auto_plan(GPT(GPTConfig(50, 16, 2, 4, 32)), Grid(2, 2))
    assert "in the scattered layout, tokens over x." in report.note
    # HF's norms round to float32, which no split of the row can repeat to float64's precision.
    plan, report = auto_plan(build().double(), Grid(2, 2))
    assert not kinds(plan)["norm"] and "is whole on every rank: " in report.note


class Streamed(nn.Module):
    """A residual model that does something with its stream that shares cannot, or that gradients of shares cannot."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.table, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 10)
        self.gate = nn.Linear(8, 1) if what == "gate" else None
        self.seen = nn.Linear(3, 8) if what == "images" else None
        self.places = nn.Embedding(99, 8) if what == "places" else None
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, ids: torch.Tensor, images: torch.Tensor | None = None) -> Any:
        x = self.table(ids)
        if self.seen is not None and images is not None:
            x = x.masked_scatter((ids == 9)[..., None], self.seen(images))
        inner = self.down(F.silu(self.up(self.norm(x))))
        between = {
            "nothing": lambda: x + inner,
            # All shapes stay valid and all values are right, but the gate's gradient is that of a share.
            "gate": lambda: x + inner * self.gate(x),  # type: ignore[misc]
            "mean": lambda: x + inner - inner.mean(-1, keepdim=True),
            "parameter": lambda: x + inner * self.scale,
            "tokens": lambda: x + inner.cumsum(-2),
            # Places counted in a share are those of another rank.
            "places": lambda: x + inner + self.places(torch.arange(x.shape[-2])),
            "images": lambda: x + inner,
            "returned": lambda: x + inner,
        }
        x = between[self.what]()
        return (self.head(x), x) if self.what == "returned" else self.head(x)


@pytest.mark.parametrize("what", ["nothing", "gate", "mean", "parameter", "tokens", "places", "images", "returned"])
def test_a_stream_is_split_only_where_that_is_proven(what: str) -> None:
    plan, report = auto_plan(Streamed(what), Grid(2, 2))
    assert {name for name, layer in plan.items() if layer.kind in ("normal", "transposed")} == {"up", "down"}
    assert bool(kinds(plan)["embedding"]) == (what in ("nothing", "tokens", "places")), report
    if what in ("nothing", "tokens", "places"):
        assert plan["table"].whole_tokens == (what != "nothing"), report
    else:
        assert "is whole on every rank: " in report.note
