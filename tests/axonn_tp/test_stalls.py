"""Layers that code calls on some ranks alone: the job ends, with a sentence that names one on every rank, and does not wait."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ted_moe
from axonn_plugins.cluster.launch import RankFailed
from axonn_tp import Grid, LayerPlan, Mesh, parallelize, sync_gradients
from axonn_tp.comm import stalls
from ted_moe.adapters import Choices, adopt, find
from tests.distributed import run_ranks
from tests.ted_moe.test_adapters import Own


def test_lists_that_differ_are_told_apart_and_those_that_go_on_are_not() -> None:
    one, other = stalls.Calls([0, 1]), stalls.Calls([0, 1])
    for name in ("a", "b", "a"):
        one.note(name)
    other.note("a")
    assert one.difference(other.record()) is None and other.difference(one.record()) is None
    other.note("c")
    assert one.difference(other.record()) == ("b", "c") and other.difference(one.record()) == ("c", "b")
    said = stalls.differ((3, "layer c"), (1, "layer b"))
    assert said.startswith("rank 1 called layer b where rank 3 called layer c, ")


def test_of_long_lists_the_last_calls_are_compared() -> None:
    one, other = stalls.Calls([0, 1]), stalls.Calls([0, 1])
    for number in range(3 * stalls._MOST):
        one.note(f"layer {number % 7}")
        if number < 2 * stalls._MOST + 100:
            other.note(f"layer {number % 7}")
    assert len(one.record()) < 2000
    assert one.difference(other.record()) is None
    other.note("something else")
    assert one.difference(other.record()) == (f"layer {(2 * stalls._MOST + 100) % 7}", "something else")


def test_a_store_that_is_lost_with_a_rank_does_not_hide_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store(dist.HashStore):
        held = threading.Event()

        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("Broken pipe")

        def check(self, keys: list[str]) -> bool:
            return self.held.wait()

    monkeypatch.setattr(stalls, "_PATIENCE", 0.1)
    watch = object.__new__(stalls._Watch)
    watch._store, watch._number, watch._rank = Store(), 1, 0
    for told in ([(0, 1)], []):  # it has gone, and it is held up
        watch.logs = {ranks: stalls.Calls(ranks) for ranks in told}
        assert watch.why(stalls.Calls([0, 1])) is None
    Store.held.set()


ALL = -1


class Three(nn.Module):
    """Layers of which those in `skipped` are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, skipped: int | None) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if skipped in (number, ALL) else x + layer(x).tanh()
        return x


class Reading(nn.Module):
    """Reads a layer's weight for its type before it calls it, as vision towers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 16)])

    def forward(self, x: Tensor, skipped: int | None) -> Tensor:
        if skipped != 0:
            x = x + self.layers[0](x.to(self.layers[0].weight.dtype))
        return self.layers[1](x)


class Mixtures(nn.Module):
    """The same of mixtures."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"experts": Own()}) for _ in range(2))

    def forward(self, x: Tensor, skipped: int | None) -> Tensor:
        chosen, weights = torch.arange(len(x))[:, None] % 4, torch.ones(len(x), 1)
        for number, layer in enumerate(self.layers):
            x = x if skipped in (number, ALL) else x + layer["experts"](x, chosen, weights)
        return x


def train(kind: str, skipped: int, since: int) -> str:
    """Two steps without one layer on rank 1 since one of them; the error in the place where it comes."""
    stalls.SECONDS, stalls._LOOK, stalls._GRACE = 1.0, 0.3, 5.0
    mesh = Mesh(Grid(gz=2))
    torch.manual_seed(0)
    if kind != "mixture":
        made = Three() if kind == "layer" else Reading()
        model: nn.Module = parallelize(made, mesh, {"layers.*": LayerPlan("normal")})
    else:
        model, groups = Mixtures(), ted_moe.Groups(ted_moe.Topology(2, 1, 2))
        for experts in find(model).values():
            adopt(experts, experts.cuts, groups, mesh, Choices())
    try:
        for step in range(2):
            x = torch.randn(3, 8, requires_grad=True)
            model(x, skipped if step >= since and dist.get_rank() else None).sum().backward()
            sync_gradients(model.parameters(), mesh)
        time.sleep(20 if skipped == ALL else 0)  # waits for something else
    except ValueError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize(
    "case, here, there",
    [
        (("layer", 1, 0), "layer layers.1", "layer layers.2"),
        (("layer", 2, 1), "layer layers.2", "its backward pass"),
        (("read", 0, 0), "the weight of layer layers.0", "layer layers.1"),
        (("mixture", 0, 1), "layers.0.experts", "layers.1.experts"),
        (("mixture", 1, 1), "layers.1.experts", "its backward pass"),
    ],
)
def test_a_layer_that_one_rank_leaves_out(case: tuple[str, int, int], here: str, there: str) -> None:
    one, other = run_ranks(train, 2, *case)
    assert one == other
    assert f" {here} " in one and f" {there} " in one or f" {there}," in one
    assert "call the same layers on every rank" in one


def test_what_nothing_follows_is_found_by_the_watch(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailed):
        run_ranks(train, 2, "mixture", ALL, 1)
    said = "axonn: rank 0 called mixture layers.0.experts where rank 1 called the sum of gradients, "
    assert capfd.readouterr().err.count(said) == 2


def route(copied: bool) -> list[str]:
    """As many layers on each rank, by its rows, but others; found in the pass after the one that is looked at, in a copy of the model, too."""
    mesh, said = Mesh(Grid(gz=2)), []
    for differs in (False, True):
        model = parallelize(Three(), mesh, {"layers.*": LayerPlan("normal")})
        model = copy.deepcopy(model) if copied else model
        try:
            for step in range(5):
                skipped = step % 2 + 1 if not differs else 2 - dist.get_rank()
                model(torch.randn(3, 8), skipped).sum().backward()
                sync_gradients(model.parameters(), mesh)
                said += [] if step else ["went on"]
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("copied", [False, True])
def test_other_layers_of_one_shape_on_each_rank(copied: bool) -> None:
    one, other = run_ranks(route, 2, copied)
    assert one == other and one[:2] == ["went on"] * 2 and len(one) == 3
    assert one[2].startswith("rank 1 called other layers than rank 0 in the model's forward, or in another order")
