"""Experts of HF's models, dealt out over ranks and split: loss and gradients are one process's, and the bytes are chapter 7's."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ted_moe
from axonn_plugins.observe.ledger import Ledger
from axonn_tp import Grid, Mesh
from axonn_tp.grid.layout import Layout
from ted_moe.adapters import Choices, adopt, blocks_of, find, splittable
from tests.distributed import run_ranks
from tests.ted_moe.mixtures import LAYOUTS, MIXTURES, difference, mixture


def differences(names: list[str]) -> dict[str, tuple[float, float]]:
    return {f"{name}, {layout}": difference(name, *LAYOUTS[layout]) for name in names for layout in LAYOUTS}


@pytest.mark.parametrize(
    "names",
    [["Mixtral"], *(pytest.param([name], marks=pytest.mark.families) for name in MIXTURES if name != "Mixtral")],
    ids=", ".join,
)
def test_layouts_equal_one_process(names: list[str]) -> None:
    for found in run_ranks(differences, 4, names):
        assert len(found) == len(names) * len(LAYOUTS)
        assert not {case: far for case, far in found.items() if max(far) > 1e-10}


def test_how_experts_lie_is_found_by_what_they_do() -> None:
    (first, *_), (interleaved, *_) = (list(find(mixture(name)).values()) for name in ("Mixtral", "GptOss"))
    assert (first.count, first.features) == (4, 32)
    assert {name: (cut.dim, cut.parts) for name, cut in splittable(first, 2).items()} == {
        "gate_up_proj": (1, 2),
        "down_proj": (2, 1),
    }
    cuts = splittable(interleaved, 2)
    assert {name: (cut.dim, cut.parts) for name, cut in cuts.items()} == {
        "gate_up_proj": (2, 1),
        "gate_up_proj_bias": (1, 1),
        "down_proj": (1, 1),
        "down_proj_bias": (None, 1),
    }
    assert cuts["down_proj_bias"].once
    assert splittable(first, 7) is None
    assert list(blocks_of(mixture("Mixtral"), {"model.layers.0.mlp.experts": first})) == ["model.layers.0.mlp"]


class Own(nn.Module):
    """Experts of a user's own, not in HF's form: rows of all of them, one expert's after another's."""

    def __init__(self, experts: int = 4, features: int = 8, inner: int = 12) -> None:
        super().__init__()
        self.num_experts, self.ffn_size = experts, inner
        self.w1 = nn.Parameter(torch.randn(experts * inner, features))
        self.w2 = nn.Parameter(torch.randn(experts * inner, features))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for number in range(self.num_experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            w1, w2 = (w.view(-1, self.ffn_size, x.shape[-1])[number] for w in (self.w1, self.w2))
            total = total.index_add(0, token, torch.relu(x[token] @ w1.t()) @ w2 * weights[token, place, None])
        return total


class Normed(Own):
    """Not the sum of weighted experts: what is given is normalised together."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return torch.nn.functional.normalize(super().forward(x, chosen, weights))


class Listed(nn.ModuleList):
    """Whose caller runs over the experts."""


def test_what_is_not_understood_is_named_with_the_reason() -> None:
    for experts, reason in (
        (Normed(), "does not give the weighted sum"),
        (Listed(nn.Linear(8, 8) for _ in range(4)), "its forward does not take"),
    ):
        (found,) = find(nn.ModuleDict({"experts": experts})).values()
        assert found.refusal is not None and reason in found.refusal
    (found,) = find(nn.ModuleDict({"mixed": Own()})).values()
    assert (found.name, found.count, found.features, found.refusal) == ("mixed", 4, 8, None)
    assert not find(nn.ModuleDict({"mixed": Normed()}))


class ManyExperts(nn.Module):
    """A model that is called after its mixtures."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixed = nn.Linear(8, 8), Own()


def test_what_is_around_experts_is_not_taken_for_them() -> None:
    (found,) = find(ManyExperts()).values()
    assert (found.name, found.refusal) == ("mixed", None)
    assert not find(ManyExperts(), apart=["mixed"])


def counted() -> dict[str, tuple[dict, int, int]]:
    """Bytes of a forward and backward of one layer of experts, by collective and axis; recomputed or not."""
    found = {}
    for name, dropping, stash in (
        ("all sent", False, None),
        ("dropped", True, None),
        ("again", True, False),
        ("kept", True, True),
    ):
        groups = ted_moe.Groups(ted_moe.Topology(4, 2, 2))
        mesh = Mesh(Grid(gx=2, gz=2))
        torch.manual_seed(1)
        model = nn.ModuleDict({"experts": Own()})
        (experts,) = find(model).values()
        adopt(experts, splittable(experts, 2), groups, mesh, Choices(dropping))
        torch.manual_seed(2 + groups.rank("data"))
        x = torch.randn(7, 8, requires_grad=True)
        chosen, weights = torch.rand(7, 4).topk(2).indices, torch.rand(7, 2)
        run = ted_moe.Stashing(model["experts"]) if stash else model["experts"]
        with Ledger(groups.axis_names()) as ledger:
            output = (
                run(x, chosen, weights) if stash is None else checkpoint(run, x, chosen, weights, use_reentrant=False)
            )
            output.sum().backward()
        calls = defaultdict(list)
        for entry in ledger.entries:
            if entry.itemsize == 4:
                calls[entry.collective.op, entry.collective.axis].append(entry.collective.elements * 4)
        found[name] = dict(calls), groups.rank("tensor"), 14
        mesh.destroy()
    return found


def test_bytes_of_a_layer_are_those_of_chapter_7() -> None:
    row = 8 * 4
    for found in run_ranks(counted, 4):
        sent = {name: calls["all_to_all", "expert"] for name, (calls, _, _) in found.items()}
        assert sent["all sent"][0] == 14 * row and sent["dropped"][0] == 7 * row
        assert len(sent["all sent"]) == len(sent["dropped"]) == len(sent["kept"]) == 4 and len(sent["again"]) == 6
        assert sum(sent["kept"]) == sum(sent["dropped"]) < sum(sent["again"])
        assert found["kept"][0] == found["dropped"][0]


def test_parts_of_an_inner_dim_are_split_each_by_itself() -> None:
    whole = torch.arange(48.0).view(2, 8, 3)
    grid = Grid(gx=2, gz=2)
    layout = Layout((2, 8, 3), ((1, "x"),), 2, over_z=True, parts_dim=1)
    shards = [layout.shard(whole, grid, grid.coordinates(rank)) for rank in range(4)]
    assert torch.equal(shards[1].view(1, 4, 3), whole[:1, [2, 3, 6, 7]])
    assert torch.equal(layout.assemble(shards, grid), whole)
