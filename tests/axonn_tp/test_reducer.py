"""Gradient sums while backward runs against the reference: the same values, each byte sent once."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import axonn_tp
from axonn_plugins.observe.ledger import Ledger
from axonn_tp import GradientReducer, Grid, LayerPlan, Mesh, Options
from axonn_tp.layers.loss_watch import LossWatch
from tests.axonn_tp.test_grids import TOLERANCE
from tests.distributed import meshes, run_ranks

GRIDS = [Grid(1, 1, 1, 4), Grid(1, 1, 4, 1), Grid(2, 1, 2, 1), Grid(1, 1, 2, 2), Grid(1, 2, 1, 2)]
OVERLAP = Options(overlap_all_reduce=True, overlap_reduce_scatter=True, overlap_all_gather=True)


class Model(nn.Module):
    """A pair of linears, a layer that no pass uses, a scale that belongs to no layer, and a shift that some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.unused = nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(3, 3)
        self.scale, self.shift = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.shifts = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out = self.down(self.up(rows).tanh()) * self.scale
        return out + self.shift if self.shifts else out


class Gated(nn.Module):
    """Linears that are called in another order than they are declared in."""

    names = ("up", "gate", "down")

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((6, 10), (6, 10), (10, 6)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(rows).sigmoid() * self.up(rows))


SPLIT = LayerPlan("self_contained")


def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return kind()


def on_grids(grids: list[Grid]) -> None:
    torch.manual_seed(3)
    serial = Model().double()
    batches = [torch.randn(8, 6, dtype=torch.float64) for _ in range(3)]
    plan = {"up": LayerPlan("normal"), "down": LayerPlan("transposed")}
    for mesh in meshes(grids):
        grid = mesh.grid
        reference = axonn_tp.parallelize(copy.deepcopy(serial), mesh, plan, OVERLAP)
        model = axonn_tp.parallelize(copy.deepcopy(serial), mesh, plan, OVERLAP)
        reducer = GradientReducer(model.parameters(), mesh, bucket_bytes=200)
        shares = [mesh.shard_batch(batch) for batch in batches]

        for share in shares:
            reference(share).square().mean().backward()
        axonn_tp.sync_gradients(reference.parameters(), mesh)
        with reducer.no_sync():
            for share in shares[:-1]:
                model(share).square().mean().backward()
        model(shares[-1]).square().mean().backward()
        reducer.finish()
        compare(model, reference, grid)

        # A second sum on top of the first: the gradients of both.
        model(shares[0]).square().mean().backward()
        reducer.finish()
        for parameter in reference.parameters():
            parameter.first = parameter.grad
        reference.zero_grad()
        reference(shares[0]).square().mean().backward()
        axonn_tp.sync_gradients(reference.parameters(), mesh)
        for parameter in reference.parameters():
            if parameter.grad is not None:
                parameter.grad += parameter.first
        compare(model, reference, grid)

        # Sums after each pass, one of them twice, and a gradient that is added to nothing in between.
        reference.zero_grad()
        for share in (*shares, shares[0]):
            loss = reference(share).square().mean()
            torch.autograd.grad(loss, reference.up.weight, retain_graph=True)
            loss.backward()
            axonn_tp.sync_gradients(reference.parameters(), mesh)
        axonn_tp.sync_gradients(reference.parameters(), mesh)
        compare(model, reference, grid)

        reducer_sees_what_some_ranks_use(model, reference, reducer, shares[0], mesh)
        bytes_of_both = []
        for each, last in ((reference, None), (model, reducer.finish)):
            each.zero_grad()
            with Ledger(mesh.axis_names()) as ledger:
                each(shares[0]).square().mean().backward()
                last() if last else axonn_tp.sync_gradients(each.parameters(), mesh)
            bytes_of_both.append(sum(c.sent * 8 for c in ledger.collectives if c.op == "all_reduce"))
        assert bytes_of_both[0] == bytes_of_both[1], grid
        if mesh.size("data") > 1:
            assert late_calls(model, reducer, shares[0], mesh) < len(reducer._buckets)


def reducer_sees_what_some_ranks_use(
    model: Model, reference: Model, reducer: GradientReducer, share: torch.Tensor, mesh: Mesh
) -> None:
    """A gradient that one rank has is everybody's, also of a bucket whose others are there; one that none has is nobody's."""
    for each in (model, reference):
        assert each.shift.grad is None and each.unused.weight.grad is None
        each.zero_grad()
        each.shifts = mesh.coordinates["z"] == mesh.coordinates["data"] == 0
        each(share).square().mean().backward()
        reducer.finish() if each is model else axonn_tp.sync_gradients(each.parameters(), mesh)
        each.shifts = False
        assert each.shift.grad is not None and each.unused.weight.grad is None
    compare(model, reference, mesh.grid)


def late_calls(model: Model, reducer: GradientReducer, share: torch.Tensor, mesh: Mesh) -> int:
    """Calls that are left for `finish`; and a pass that nobody expects is refused."""
    model.zero_grad()
    loss = model(share).square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=re.escape("call finish() after the last pass")):
        loss.backward()
    with Ledger(mesh.axis_names()) as ledger:
        reducer.finish()
    return len(ledger.collectives)


def compare(model: nn.Module, reference: nn.Module, grid: Grid) -> None:
    for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), (grid, name)
        assert mine.grad is None or (mine.grad - other.grad).abs().max() < TOLERANCE, (grid, name)


def test_sums_equal_the_reference_and_are_sent_once() -> None:
    run_ranks(on_grids, 4, GRIDS)


def test_bucket_bytes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="bucket_bytes = 0 is less than 1"):
        GradientReducer([], None, bucket_bytes=0)  # type: ignore[arg-type]


def special_steps() -> None:
    mesh = Mesh(Grid(1, 1, 2, 1))
    plan = {"up": LayerPlan("normal"), "down": LayerPlan("transposed")}
    model = axonn_tp.parallelize(Model(), mesh, plan)
    axonn_tp.sync_gradients(model.parameters(), mesh)  # weights split over z are summed over data, which is one rank
    assert all(parameter.grad is None for parameter in model.parameters())

    # A layer is frozen in a step of the others, whose gradients are new, and keeps the sums that it has.
    reducer, rows = GradientReducer(model.parameters(), mesh), torch.randn(4, 6) + mesh.coordinates["z"]
    model(rows).square().mean().backward()
    reducer.finish()
    kept = [parameter.grad.clone() for parameter in model.up.parameters()]
    model.up.requires_grad_(False)
    model.down.zero_grad()
    model(rows).square().mean().backward()
    reducer.finish()
    for parameter, before in zip(model.up.parameters(), kept, strict=True):
        assert torch.allclose(parameter.grad, before)
    assert all(parameter.grad is None for parameter in model.unused.parameters())

    # Gradients that come in another order than weights were declared in share a reduce-scatter of their bucket's size.
    model, reference = (axonn_tp.parallelize(model_of(Gated), mesh, dict.fromkeys(Gated.names, SPLIT)) for _ in "ab")
    reducer = GradientReducer(model.parameters(), mesh)
    for _ in range(3):
        for each in (model, reference):
            each.zero_grad()
            each(rows).square().mean().backward()
        reducer.finish()
        axonn_tp.sync_gradients(reference.parameters(), mesh)
        compare(model, reference, mesh.grid)

    trained_later(mesh, rows)
    layers_that_one_rank_calls(mesh, rows)
    shards_that_losses_read(mesh, rows)
    penalties_over_x_and_y()


def trained_later(mesh: Mesh, rows: torch.Tensor) -> None:
    """What was frozen when the reducer was made is summed once it is trained; gradients that a script asks for itself change no sum."""
    plan = {**dict.fromkeys(Gated.names, SPLIT), "up": LayerPlan("replicated")}
    model, reference = (axonn_tp.parallelize(model_of(Gated), mesh, plan) for _ in "ab")
    model.up.requires_grad_(False)
    reducer = GradientReducer(model.parameters(), mesh)
    for turn in range(4):
        for each in (model, reference):
            each.up.requires_grad_(turn > 0)
            each.zero_grad()
            each(rows).square().mean().backward()
        reducer.finish()
        axonn_tp.sync_gradients(reference.parameters(), mesh)
        torch.autograd.grad(model(rows).mean(), [p for p in model.parameters() if p.requires_grad])
        compare(model, reference, mesh.grid)


class Chosen(Gated):
    """A layer that some ranks call, whose gradient is the first of all."""

    def __init__(self) -> None:
        super().__init__()
        self.expert, self.calls = nn.Linear(6, 6), True

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out = super().forward(rows)
        return out + self.expert(rows) if self.calls else out


def layers_that_one_rank_calls(mesh: Mesh, rows: torch.Tensor) -> None:
    """Its sum begins with the others', behind those over z, on the rank that calls it as on the one that does not."""
    plan = {**dict.fromkeys(Gated.names, SPLIT), "expert": LayerPlan("replicated")}
    model, reference = (axonn_tp.parallelize(model_of(Chosen), mesh, plan) for _ in "ab")
    reducer = GradientReducer(model.parameters(), mesh, bucket_bytes=100)
    for called in (True, mesh.coordinates["z"] == 0):
        for each in (model, reference):
            each.zero_grad()
            each.calls = called
            each(rows).square().mean().backward()
        reducer.finish()
        axonn_tp.sync_gradients(reference.parameters(), mesh)
        compare(model, reference, mesh.grid)


class Decayed(Gated):
    """Takes the norm of a weight in its forward, where it is whole."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows).bfloat16() + self.up.weight.square().sum() + self.down.weight.float().abs().sum()


def shards_that_losses_read(mesh: Mesh, rows: torch.Tensor) -> None:
    """Found in the first, second and fourth loss; what layers do with their own shards, and with weights in a forward, is no such reading."""
    plan = dict.fromkeys(Gated.names, SPLIT)
    model = axonn_tp.parallelize(model_of(Decayed), mesh, plan)
    watch = LossWatch(model)
    for _ in range(4):
        watch.look(model(rows).square().mean() + model(rows).mean())
    computed: list[int] = []

    def noted(rows: torch.Tensor) -> torch.Tensor:
        computed.append(1)
        return model(rows) * rows * 2.0

    unused = 0 * sum(parameter.sum() for parameter in model.parameters())
    LossWatch(model).look(checkpoint(noted, rows, use_reentrant=False).mean() + unused)
    assert computed == [1]  # what is in checkpoints is not recomputed to be looked at
    watch = LossWatch(model)
    watch.look(model(rows).square().mean())
    for read in (model.down.weight.square(), model.gate.weight.bfloat16().abs()):
        loss = model(rows).square().mean() + read.sum()
        name = "down.weight" if read.dtype == torch.float32 else "gate.weight"
        with pytest.raises(
            ValueError, match=f"reads {name} outside of its layer, where a rank has nothing but its shard"
        ):
            watch.look(loss)
        watch.look(loss)  # the third
    passes: list[int] = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    # The products of a block that is checkpointed are there no more, and are not computed for it.
    loss = torch.utils.checkpoint.checkpoint(
        lambda x: (model(x) * x.mean()).sin() * model(x), rows, use_reentrant=False
    ).sum()
    LossWatch(model).look(loss)
    assert len(passes) == 2
    gradients_that_layers_give(mesh, rows)
    for options in (OVERLAP, Options(overlap_reduce_scatter=False)):
        model = axonn_tp.parallelize(model_of(Tied), mesh, plan, options)
        for passes in range(1, 5):
            loss = model(rows).square().mean() + 1e-5 * model.down.weight.norm() ** 2
            if passes == 3:
                loss.backward()
                continue
            with pytest.raises(ValueError, match="reads down.weight outside of its layer"):
                loss.backward()


PENALTIES: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    "squares": lambda weights: 0.5 * sum((weight.float() ** 2).sum() for weight in weights),
    "squared norms": lambda weights: torch.stack([weight.norm() ** 2 for weight in weights]).mean(),
    "squared rows": lambda weights: (torch.linalg.vector_norm(weights[0], dim=1) ** 2).sum(),
    "magnitudes": lambda weights: torch.cat([weight.view(-1) for weight in weights]).abs().sum() / 3,
    "sums of magnitudes": lambda weights: -weights[0].norm(p=1),
    "weighed": lambda weights: torch.tensor(0.1) * sum((torch.tensor(3.0) ** weight).sum() / 2 for weight in weights),
    "several": lambda weights: (weights[0] * weights[0] - (weights[0] + weights[1]).abs()).sum(),
    "products": lambda weights: torch.dot(weights[0].view(-1), weights[0].view(-1)),
    "distances": lambda weights: F.mse_loss(weights[0], torch.ones_like(weights[0]), reduction="sum"),
    "norms": lambda weights: sum(weight.norm() for weight in weights),
    "norm of all": lambda weights: torch.stack([weight.norm() for weight in weights]).norm(),
    "means": lambda weights: weights[0].square().mean(),
    "means of rows": lambda weights: weights[0].square().sum(1).mean(),
    "rows": lambda weights: weights[0].square().sum(1).sqrt().sum() + weights[0].square().sum(0).sqrt().sum(),
    "centred": lambda weights: (weights[0] - weights[0].mean()).square().sum(),
    "orthogonal": lambda weights: (weights[1].t() @ weights[1] - torch.eye(weights[1].shape[1])).square().sum(),
    "square of a sum": lambda weights: weights[0].abs().sum() ** 2,
    "between rows": lambda weights: (weights[0].unsqueeze(0) - weights[0].unsqueeze(1)).square().sum(),
    "one of each": lambda weights: weights[0][0].square().sum(),
}


def penalties_over_x_and_y() -> None:
    """Refused are those whose gradient on shards is on one of the grids not the serial model's."""
    refused, wrong = set[str](), set[str]()
    for grid in (Grid(2, 1, 1, 1), Grid(1, 2, 1, 1)):
        mesh = Mesh(grid)
        plan = {"up": LayerPlan("normal"), "gate": LayerPlan("normal"), "down": LayerPlan("transposed")}
        serial, model = model_of(Gated), axonn_tp.parallelize(model_of(Gated), mesh, plan).eval()
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
        for name, penalty in PENALTIES.items():
            for each in (serial, model):
                each.zero_grad()
                penalty([*each.parameters()]).backward()
            right = all(
                mine.grad is None
                or torch.allclose(mine.grad, mine.axonn_layout.block(other.grad, grid, mesh.coordinates))
                for mine, other in zip(model.parameters(), serial.parameters(), strict=True)
            )
            every = [None, None]
            torch.distributed.all_gather_object(every, right)
            watch = LossWatch(model)
            loss = model(rows).square().mean() + penalty([*model.parameters()])
            wrong |= set() if all(every) else {name}
            try:
                watch.look(loss)
                assert all(every) and watch.summed is not None, name
            except ValueError as error:
                assert "weight outside of its layer" in str(error)
                refused.add(name)
        watch = LossWatch(model)
        watch.look(model(rows).square().sum() + 0 * sum(weight.sum() for weight in model.parameters()))
        assert watch.summed is None
        model.train()
        for _ in range(2):
            loss = model(rows).square().mean() + sum(weight.norm() for weight in model.parameters())
            with pytest.raises(ValueError, match="reads up.weight outside of its layer"):
                loss.backward()
        given = rows.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(given).square().mean(), given, create_graph=True)
        gradient.norm().backward()
    assert refused == wrong and len(wrong) == 10


class Tied(Gated):
    """Calls a layer twice, once with a weight made of the layer's, and reads another's weight; trains on gradients' gradients."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out = super().forward(rows) + F.linear(self.up(rows), self.down.weight)
        return out + functional_call(self.gate, {"weight": 2 * self.gate._parameters["weight"]}, (rows,)).mean()  # type: ignore[operator]


def gradients_that_layers_give(mesh: Mesh, rows: torch.Tensor) -> None:
    """All of these are layers' own, in whatever way they come: of two calls, of cast sums, of gradients of gradients, beside users' hooks."""
    for options in (OVERLAP, Options(), Options(gradient_dtype="float32")):
        model = axonn_tp.parallelize(model_of(Tied), mesh, dict.fromkeys(Gated.names, SPLIT), options)
        model.down.weight.register_hook(lambda gradient: 2 * gradient)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(rows).square().mean()
            LossWatch(model).look(loss)
            loss.backward(retain_graph=True)
            (loss + model(rows).mean()).backward()
            given = rows.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(model(given).square().mean(), given, create_graph=True)
            gradient.square().sum().backward()
    model, table = axonn_tp.parallelize(Model(), mesh), torch.ones(3, 6, requires_grad=True)
    with pytest.raises(ValueError, match=r"scale_grad_by_freq = True"):
        model(F.embedding(torch.tensor([0, 1, 1]), table, scale_grad_by_freq=True)).sum().backward()  # type: ignore[attr-defined]
    (model(rows).square().mean() + 0 * sum(p.sum() for p in model.parameters())).backward()  # type: ignore[attr-defined]


def test_steps_without_gradients_and_beside_a_frozen_layer() -> None:
    run_ranks(special_steps, 2)
