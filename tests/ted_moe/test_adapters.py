"""Experts of HF's models, dealt out over ranks and split: loss and gradients are one process's, and the bytes are chapter 7's."""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ted_moe
from axonn_plugins.hosts.common.experts import experts_of
from axonn_plugins.observe.ledger import Ledger
from axonn_tp import Grid, Mesh, layout_of, sync_gradients
from axonn_tp.grid.layout import Layout
from ted_moe.adapters import Choices, adopt, blocks_of, find, splittable, suspect
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.ted_moe.mixtures import LAYOUTS, MIXTURES, before_ranks, difference, mixture

EACH_ONCE = (
    "expert and tensor, two steps",
    "expert and tensor, all tokens sent",
    "expert and tensor, in slices",
    "whole experts",
    "tensor and shares",
)
"""Layouts with every setting, and every axis but y, which `test_drawn` has."""


def differences(name: str, layouts: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    return {layout: difference(name, *LAYOUTS[layout]) for layout in layouts}


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("Mixtral", EACH_ONCE),
        thorough("Mixtral", tuple(LAYOUTS)),
        *(pytest.param(name, tuple(LAYOUTS), marks=pytest.mark.families) for name in MIXTURES if name != "Mixtral"),
    ],
    ids=lambda given: given if isinstance(given, str) else f"{len(given)} layouts",
)
def test_layouts_equal_one_process(name: str, layouts: tuple[str, ...]) -> None:
    before_ranks(name, layouts)
    for found in run_ranks(differences, 4, name, layouts):
        assert len(found) == len(layouts)
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


class Numbered(Own):
    """Whose second half computes something else, by a buffer that no rank would cut."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", torch.tensor([1.0, 1.0, 1.0, 2.0]))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, chosen, weights * self.get_buffer("scales")[chosen])


class Full(Own):
    """Whose experts have room for twice an even share of the rows, or in training alone."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if not (self.always or self.training):
            return super().forward(x, chosen, weights)
        room = max(4, 2 * chosen.numel() // self.num_experts)
        places = (torch.nn.functional.one_hot(chosen.flatten(), self.num_experts).cumsum(0) - 1).gather(
            1, chosen.reshape(-1, 1)
        )
        return super().forward(x, chosen, weights * (places.view_as(chosen) < room))


class Counting(Own):
    """Which counts its tokens for a router, or leaves a loss for the model."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.spread = where, 0.0
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if self.where == "load":
            self.get_buffer("load").add_(torch.bincount(chosen.flatten(), minlength=4)[:4])
        else:
            self.spread = weights.square().sum()  # type: ignore[assignment]
        return super().forward(x, chosen, weights)


def test_experts_whose_outputs_hang_on_other_rows_or_that_leave_numbers_are_refused() -> None:
    for experts, reason in (
        (Full(True), "gives a token something else beside other tokens"),
        (Full(False), "gives a token something else beside other tokens"),
        (Counting("load"), "leaves load behind"),
        (Counting("spread"), "leaves spread behind"),
    ):
        (found,) = find(nn.ModuleDict({"experts": experts})).values()
        assert found.refusal is not None and reason in found.refusal
        assert not any(bool(buffer.any()) for buffer in experts.buffers())


class Inline(nn.Module):
    """A mixture whose experts are matrices of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 12)), nn.Parameter(torch.randn(4, 12, 8))


class Looping(nn.Module):
    """A mixture that runs over a list whose name says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.mlps = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


class Held(nn.Module):
    """A list of experts in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.ffn = nn.Linear(8, 4), nn.ModuleDict({"mlps": Looping().mlps})


def test_experts_that_go_by_their_number_are_refused() -> None:
    (found,) = find(nn.ModuleDict({"experts": Numbered()})).values()
    assert found.refusal is not None and "computes something else for equal weights by the number" in found.refusal
    (found,) = find(
        nn.ModuleDict({"experts": nn.ModuleDict({"all": Listed(nn.Linear(8, 8) for _ in range(4))})})
    ).values()
    assert found.refusal is not None


@pytest.mark.parametrize(("mixture", "said"), [(Inline, "up"), (Looping, "mlps"), (Held, "ffn.mlps")])
def test_what_looks_like_a_mixture_is_not_trained_as_dense_in_silence(mixture: type[nn.Module], said: str) -> None:
    with pytest.raises(
        ValueError, match=rf"layer mixed \({mixture.__name__}\) has 4 scores by .* and 4 experts in {said}"
    ):
        experts_of(nn.ModuleDict({"mixed": mixture()}))


def test_parameters_that_two_layers_have_are_refused() -> None:
    model = nn.ModuleDict({"first": Own(), "second": Own()})
    model["second"].w1 = model["first"].w1
    with pytest.raises(ValueError, match="layer first has a parameter that second has, too"):
        experts_of(model)


def test_layers_beside_a_head_are_no_mixture() -> None:
    assert (
        suspect(nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), "head": nn.Linear(8, 4)}))
        is None
    )
    assert suspect(mixture("Mixtral")) is not None


class ManyExperts(nn.Module):
    """A model that is called after its mixtures."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixed = nn.Linear(8, 8), Own()


def test_what_is_around_experts_is_not_taken_for_them() -> None:
    (found,) = find(ManyExperts()).values()
    assert (found.name, found.refusal) == ("mixed", None)
    assert not find(ManyExperts(), apart=["mixed"])


class Scaled(Own):
    """With what all experts share before and after them, and a number for each."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))
        self.each, self.all = nn.Parameter(torch.rand(4)), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x * self.before, chosen, weights * self.each[chosen]) * self.after * self.all


def routes_of_sequences() -> str:
    """The words of a call with experts for each of two sequences of four tokens."""
    groups, mesh = ted_moe.Groups(ted_moe.Topology(4, 2, 2)), Mesh(Grid(gx=2, gz=2))
    model = nn.ModuleDict({"experts": Own()})
    (experts,) = find(model).values()
    adopt(experts, experts.cuts, groups, mesh, Choices())
    said = ""
    try:
        model["experts"](torch.randn(2, 4, 8), torch.zeros(2, 4, dtype=torch.int64), torch.rand(2, 4))
    except ValueError as error:
        said = str(error)
    mesh.destroy()
    return said


def shared_gradients() -> float:
    """The largest difference to one process of a gradient of `Scaled`, its experts dealt out over two ranks and split over two."""
    groups, mesh = ted_moe.Groups(ted_moe.Topology(4, 2, 2)), Mesh(Grid(gx=2, gz=2))
    torch.manual_seed(1)
    model = nn.ModuleDict({"experts": Scaled().double()})
    serial = copy.deepcopy(model)
    (experts,) = find(model).values()
    cuts = splittable(experts, 2)
    assert cuts is not None and cuts["w1"].dim == 0
    adopt(experts, cuts, groups, mesh, Choices())
    for reader in range(2):
        torch.manual_seed(2 + reader)
        x = torch.randn(7, 8, dtype=torch.float64)
        routes = torch.rand(7, 4).topk(2).indices, torch.rand(7, 2, dtype=torch.float64)
        (serial["experts"](x, *routes).square().sum() / 2).backward()
        if reader == groups.rank("data"):
            model["experts"](x, *routes).square().sum().backward()
    sync_gradients(model.parameters(), mesh)
    found = [0.0]
    for name, parameter in model.named_parameters():
        layout, wanted = layout_of(parameter), serial.get_parameter(name).grad
        assert parameter.grad is not None and wanted is not None
        found.append((parameter.grad - layout.shard(wanted, mesh.grid, mesh.coordinates)).abs().max().item())
    mesh.destroy()
    return max(found)


def counted_and_compared() -> tuple[dict[str, tuple[dict, int, int]], float, str]:
    return counted(), shared_gradients(), routes_of_sequences()


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


def test_bytes_of_a_layer_are_those_of_chapter_7_and_what_experts_share_has_its_whole_gradient() -> None:
    row = 8 * 4
    for found, apart, said in run_ranks(counted_and_compared, 4):
        assert apart < 1e-10 and "was given 8 tokens and experts of 2" in said
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
