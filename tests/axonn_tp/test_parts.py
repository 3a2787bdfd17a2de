"""Parts of a split model that a script calls by themselves give what they give in one process, and train so, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from axonn_tp import Grid, Mesh, Options, parallelize, sync_gradients
from tests.axonn_tp.families import VOCABULARY, NanoGPT
from tests.axonn_tp.test_grids import largest_error
from tests.distributed import meshes, run_ranks
from tests.matrix import thorough


class Autoencoder(nn.Module):
    """A pair between whose layers a script takes the code, and a parameter that meets shares."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 12), nn.PReLU(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))
        self.decoder = nn.Sequential(nn.GELU(), nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class Bodied(nn.Module):
    """A language model whose body is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = NanoGPT()
        self.head, self.body.lm_head = self.body.lm_head, nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(ids))


class Tied(nn.Module):
    """Reads its table's weight in a part."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.inner = Reading(self)

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids)


class Reading(nn.Module):
    def __init__(self, tied: Tied) -> None:
        super().__init__()
        self.table, self.up, self.down = tied.table, tied.up, tied.down

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        return F.linear(rows + self.down(torch.relu(self.up(rows))), self.table.weight)


class Moved(nn.Module):
    """Moves features between the layers of a pair, and ends there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"up": nn.Linear(8, 8)})
        self.first, self.down = Moving(self.inner["up"]), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.first(x).flatten(-2))


class Moving(nn.Module):
    def __init__(self, up: nn.Module) -> None:
        super().__init__()
        self.up = up

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).unflatten(-1, (-1, 2))


def coded(model: Any, x: Tensor) -> list[Tensor]:
    code = model.encoder(x)
    return [code, model.decoder(code), model.decoder(2 * code), checkpoint(model.encoder, x, use_reentrant=False)]


def bodied(model: Any, ids: Tensor) -> list[Tensor]:
    states = model.body(ids)
    rows = model.body.wte(ids)
    normed = model.body.h[0].ln_1(rows)
    wide = model.body.h[0].attn.c_attn(normed)
    return [states, rows, model.body.h(rows), normed, wide, model.head(states), model(ids)]


def tied(model: Any, ids: Tensor) -> list[Tensor]:
    return [model.inner(ids)]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], list[Tensor]], bool]] = {
    "autoencoder": (Autoencoder, coded, False),
    "body": (Bodied, bodied, True),
    "tied": (Tied, tied, True),
}


def called(name: str, layout: str, mesh: Mesh) -> float:
    """Largest difference of what parts give, and of the gradients of a loss of all of it, from those of one process."""
    build, call, ids = CASES[name]
    torch.manual_seed(2)
    serial, given = build().double(), torch.randint(VOCABULARY, (4, 5))
    x = given if ids else torch.randn(4, 5, 6, dtype=torch.float64)
    model = parallelize(copy.deepcopy(serial), mesh, "auto", Options(layout=layout), example_inputs=(x,))
    expected, made = call(serial, x), call(model, mesh.shard_batch(x))
    far = [(mesh.shard_batch(a) - b).abs().max().item() for a, b in zip(expected, made, strict=True)]
    for outputs in (expected, made):
        sum(one.square().mean() + one.norm(dim=-1).mean() for one in outputs).backward()  # type: ignore[union-attr]
    sync_gradients(model.parameters(), mesh)
    far.append(largest_error(serial, model, mesh, lambda p: p.grad))
    with torch.no_grad():
        alone = copy.deepcopy(model)
        copied = call(alone.eval(), mesh.shard_batch(x))
        far += [(a - b).abs().max().item() for a, b in zip(made, copied, strict=True)]
    return max(far)


def refusals(mesh: Mesh) -> None:
    plan = {"first.up": "normal", "down": "transposed"}
    model = parallelize(Moved(), mesh, plan)
    model(torch.randn(2, 3, 8))
    for _ in range(2):  # what a refused call began has ended
        with pytest.raises(
            ValueError, match="^first was called by itself and gives a share .* which the plan splits over x"
        ):
            model.first(torch.randn(2, 3, 8))
    model(torch.randn(2, 3, 8))
    norm = parallelize(Bodied(), mesh, "auto", example_inputs=(torch.zeros(2, 4, dtype=torch.long),)).body.ln_f
    with pytest.raises(ValueError, match="does not tell of how many tokens it is a share, where the plan scatters"):
        norm(torch.randn(2, 4, 32))


def everywhere(grids: list[Grid]) -> dict[str, float]:
    found = {}
    for mesh in meshes(grids):
        for name in CASES:
            for layout in ("scattered", "replicated"):
                found[f"{name} {layout} {mesh.grid}"] = called(name, layout, mesh)
        if mesh.size("x") > 1:
            refusals(mesh)
    return found


@pytest.mark.parametrize("grids", [[Grid(2, 2)], thorough([Grid(4), Grid(1, 2, 2), Grid(2, 1, 1, 2)])], ids=str)
def test_parts_equal_those_of_one_process(grids: list[Grid]) -> None:
    for found in run_ranks(everywhere, 4, grids):
        wrong = {case: far for case, far in found.items() if not far < 1e-10}
        assert not wrong, wrong
