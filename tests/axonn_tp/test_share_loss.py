"""What cannot be differentiated rank by rank is refused on every rank: a loss of shares, a parameter used on shares and otherwise."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from axonn_tp import Mesh, Options, layout_of, parallelize, sync_gradients
from axonn_tp.layers.uses_on_shares import uses_on_shares
from tests.axonn_tp.test_auto import Everywhere
from tests.distributed import run_ranks

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda stream, inner: stream.square().mean(),
    "scaled": lambda stream, inner: (stream.var() * 3 + 1) / 4,
    "norm": lambda stream, inner: stream.norm(),
    "sum by elements": lambda stream, inner: 0.5 * inner.square().sum() / inner.numel(),
    "beside another": lambda stream, inner: 0.1 * inner.square().mean() + 2.0,
    "norm by hand": lambda stream, inner: (stream.square().sum() + 1e-9).sqrt(),
    "of two": lambda stream, inner: (stream.square().sum() + 2 * inner.square().sum()).double() ** 0.5,
    "product": lambda stream, inner: 0.5 * stream.sum() * inner.sum(),
    "inverse": lambda stream, inner: 1 / (1 + inner.square().sum()),
    "of a function": lambda stream, inner: nn.functional.mse_loss(inner, torch.ones_like(inner)),
}


def _in_place(inner: Tensor) -> Tensor:
    total = inner.square().sum()
    total /= inner.numel()
    return total


LOSSES["sum by elements, in place"] = lambda stream, inner: _in_place(inner)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down, self.last = (
            nn.Embedding(11, 8),
            nn.Linear(8, 12),
            nn.Linear(12, 8),
            nn.Linear(8, 5),
        )

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        stream = self.table(tokens)
        inner = self.up(stream).tanh()
        stream = stream + self.down(inner)
        return stream, inner, self.last(stream)


def _refusals() -> list[str]:
    said = []
    plan = {"table": "embedding", "up": "normal", "down": "transposed", "last": "head"}
    for sizes in ({"gx": 2}, {"gy": 2}):
        torch.manual_seed(0)
        model = parallelize(Net().double(), Mesh.create(**sizes), plan)
        for name, loss in LOSSES.items():
            for differentiate in (
                Tensor.backward,
                torch.autograd.backward,
                lambda made, model=model: torch.autograd.grad(made, model.up.bias),
            ):
                stream, inner, whole = model(torch.arange(6).view(2, 3))
                assert isinstance(stream.square().mean().item(), float) and stream.detach().max() > 0
                try:
                    differentiate(loss(stream, inner) + whole.mean())
                    said.append(f"{sizes} {name}: went on")
                except ValueError as error:
                    said.append(str(error))
        stream, _, whole = model(torch.arange(6).view(2, 3))
        assert type(stream.sum() * 2) is not Tensor and type(stream.sum() + whole.sum()) is Tensor
        assert type((stream.sum() - stream.sum().mean()).clone()) is type(stream.sum())
        (stream.square().sum() / 7).backward(retain_graph=True)
        (whole.square().mean() + stream.sum()).backward()  # shares' sums add up to the whole's, as their gradients do
    return said


def _shared_uses() -> None:
    """By a plan that nothing but `auto_plan` could tell from a right one; refused in the first training pass, not in evaluation."""
    tokens, plan = torch.arange(6).view(2, 3), {"up": "normal", "down": "transposed"}
    for sizes in ({"gx": 2}, {"gy": 2}):
        mesh = Mesh.create(**sizes)
        for kind, named in (("activation", "act.weight"), ("rows", "table.weight"), ("within", None)):
            torch.manual_seed(1)
            serial = Everywhere(kind).double()
            model = parallelize(copy.deepcopy(serial), mesh, plan)
            model.eval()(tokens)
            model.train()
            if named is not None:
                with pytest.raises(ValueError, match=f"{named} is used on features that a pair of the plan splits"):
                    model(tokens)
            for each in (model, serial) if named is None else ():
                each(tokens).square().mean().backward()
            sync_gradients(model.parameters(), mesh)
            for mine, other in zip(model.parameters(), serial.parameters(), strict=True):
                if mine.grad is not None and not hasattr(mine, "axonn_layout"):
                    assert (mine.grad - other.grad).abs().max() < 1e-12


class _Calling(Everywhere):
    """Calls itself first, as models do that refine what they gave."""

    gradients, again = False, True

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.again:
            return super().forward(tokens)
        self.again = False
        with torch.set_grad_enabled(self.gradients):
            first = self(tokens)
        self.again = True
        return super().forward(tokens) + first


def _called_within() -> None:
    """A pass in which the model calls itself is looked at as any other, and nothing is noted behind it."""
    tokens, plan, mesh = torch.arange(6).view(2, 3), {"up": "normal", "down": "transposed"}, Mesh.create(gx=2)
    for gradients in (False, True):
        for kind in ("activation", "within"):
            torch.manual_seed(1)
            serial = _Calling(kind).double()
            serial.gradients = gradients
            model = parallelize(copy.deepcopy(serial), mesh, plan)
            if kind == "activation":
                with pytest.raises(ValueError, match="act.weight is used on features that a pair of the plan splits"):
                    model(tokens)
            else:
                for each in (model, serial):
                    each(tokens).square().mean().backward()
                assert not _differences(model, serial, mesh), gradients
            assert not uses_on_shares, (gradients, kind)


class _Scaled(nn.Module):
    """A pair between whose layers an argument comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        return self.down(self.up(x) * by.exp())


def _arguments_on_shares() -> None:
    """Gradients of what a model is given are whole, or refused."""
    for sizes in ({"gx": 2}, {"gy": 2}):
        torch.manual_seed(6)
        serial = _Scaled().double()
        model = parallelize(copy.deepcopy(serial), Mesh.create(**sizes), {"up": "normal", "down": "transposed"})
        x, by = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 8), (3, 1)))
        x.requires_grad_()
        (wanted,) = torch.autograd.grad(serial(x, by).square().mean(), x)
        (found,) = torch.autograd.grad(model(x, by).square().mean(), x)
        assert (found - wanted).abs().max() < 1e-12, sizes
        source = torch.zeros(3, 1, dtype=torch.float64, requires_grad=True)
        for passes, given in enumerate((source, source + by)):
            model = parallelize(copy.deepcopy(serial), Mesh.create(**sizes), {"up": "normal", "down": "transposed"})
            model.train(not passes)  # as a search for an adversarial input has it, too
            with pytest.raises(ValueError, match=r"given a tensor of shape \(3, 1\) that needs a gradient"):
                model(x, given)


def _whole_last_layer() -> None:
    """A layer that the plan does not name reads a stream of shares: it gives what the serial one gives, on every rank."""
    plan = {"table": "embedding", "up": "normal", "down": "transposed"}
    for sizes, layout in itertools.product(({"gx": 2}, {"gy": 2}), ("scattered", "replicated")):
        mesh = Mesh.create(**sizes)
        for length in (1, 3, 4):
            torch.manual_seed(2)
            serial = Net().double()
            model = parallelize(copy.deepcopy(serial), mesh, plan, Options(layout=layout))
            found = []
            for each in (model, serial):
                last = each(torch.arange(2 * length).view(2, length))[2]
                last.square().mean().backward()
                found.append(last)
            sync_gradients(model.parameters(), mesh)
            assert (found[0] - found[1]).abs().max() < 1e-12, (sizes, layout, length)
            for mine, other in zip(model.parameters(), serial.parameters(), strict=True):
                wanted = layout_of(mine).shard(other.grad, mesh.grid, mesh.coordinates)
                assert (mine.grad - wanted).abs().max() < 1e-12, (sizes, layout, length)


class _Block(nn.Module):
    """A pair with a slope between its layers, and a norm in the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.up, self.act, self.down, self.last = (
            nn.Embedding(11, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 12),
            nn.PReLU(),
            nn.Linear(12, 8),
            nn.Linear(8, 5),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.table(tokens)
        return self.last(stream + self.down(self.act(self.up(self.norm(stream)))))


_PAIR = {"up": "normal", "down": "transposed"}
_STREAM = {"table": "embedding", "norm": "norm", **_PAIR, "last": "head"}


def _differences(model: nn.Module, serial: nn.Module, mesh: Mesh) -> dict[str, float]:
    sync_gradients(model.parameters(), mesh)
    found = {}
    for (name, mine), other in zip(model.named_parameters(), serial.parameters(), strict=True):
        wanted = layout_of(mine).shard(other.grad, mesh.grid, mesh.coordinates)
        if not mine.grad.sub(wanted).abs().max() < 1e-10:
            found[name] = (mine.grad.norm() / wanted.norm()).item()
    return found


def _copied_and_changed() -> None:
    """A copy, a layer that was frozen, parameters that take others' places or come later, and shares whose first gradients are near each other."""
    tokens = torch.arange(10).view(2, 5)
    for sizes, plan in itertools.product(({"gx": 2}, {"gy": 2}, {"gz": 2}), (_PAIR, _STREAM)):
        mesh = Mesh.create(**sizes)
        for case in ("copy", "frozen", "assigned", "near", "added"):
            torch.manual_seed(3)
            serial = _Block().double()
            if case == "near":
                with torch.no_grad():
                    for half in (serial.up.weight, serial.up.bias, serial.down.weight.t()):
                        half[6:] = half[:6] * 1.001
            weights = {name: tensor.clone() for name, tensor in serial.state_dict().items()}
            model = copy.deepcopy(serial).requires_grad_(case != "frozen")
            parallelize(model, mesh, plan)
            model = copy.deepcopy(model.requires_grad_(True)) if case == "copy" else model.requires_grad_(True)
            if case == "assigned":
                model.load_state_dict(weights, assign=True)
            if case == "added":
                model.act = nn.PReLU().double()
            mean_of = mesh.shard_batch(tokens)
            model(mean_of).square().mean().backward()
            serial(tokens).square().mean().backward()
            assert not _differences(model, serial, mesh), (sizes, plan, case)


def _penalties() -> None:
    """What a loss reads of norms and biases outside of their layers counts once, wherever tokens are scattered."""
    tokens = torch.arange(10).view(2, 5)
    penalty = lambda model: sum(p.abs().sum() for p in (*model.norm.parameters(), model.down.bias))  # noqa: E731
    for sizes in ({"gx": 2}, {"gy": 2}):
        mesh = Mesh.create(**sizes)
        torch.manual_seed(4)
        serial = _Block().double()
        model = parallelize(copy.deepcopy(serial), mesh, _STREAM)
        for each in (model, serial):
            (each(tokens).square().mean() + penalty(each)).backward()
            penalty(each).backward()
            each(tokens).square().mean().backward()
        assert not _differences(model, serial, mesh), sizes
        for kept, late in itertools.product(({"up": "normal", "down": "transposed"}, _STREAM), (False, True)):
            model = parallelize(_Block().double(), mesh, kept)
            if late:  # it comes in the second pass alone
                model(tokens).square().mean().backward()
            with pytest.raises(ValueError, match="act.weight is used on features that a pair of the plan splits"):
                (model(tokens).square().mean() + model.act.weight.square().sum()).backward()
    for layer, change in (
        ("up", lambda layer: prune.l1_unstructured(layer, "weight", 0.5)),
        ("down", nn.utils.parametrizations.weight_norm),
    ):
        with pytest.raises(AttributeError, match=f"weight of layer {layer} is split"):
            change(getattr(model, layer))
            model(tokens)


def _several_passes() -> None:
    """One backward through several forwards, as of two views, step for step; and gradients of gradients, which no rank has alone."""
    tokens, mesh = torch.arange(10).view(2, 5), Mesh.create(gx=2)
    torch.manual_seed(5)
    serial = _Block().double()
    model = parallelize(copy.deepcopy(serial), mesh, _PAIR)
    for passes in (1, 3, 2, 2):
        for each in (model, serial):
            each.zero_grad()
            sum(each((tokens + number) % 11).square().mean() for number in range(passes)).backward()
        assert not _differences(model, serial, mesh), passes
    for plan, name in ((_PAIR, "act"), (_STREAM, "norm")):
        model = parallelize(copy.deepcopy(serial), mesh, plan)
        with pytest.raises(ValueError, match="gradients were asked for with create_graph=True"):
            torch.autograd.grad(model(tokens).square().mean(), getattr(model, name).weight, create_graph=True)


ACROSS: dict[str, Callable[[Tensor], Any]] = {
    "argmax": lambda logits: logits.argmax(-1) == 0,
    "max": lambda logits: torch.max(logits, dim=2).indices,
    "topk": lambda logits: logits.topk(2).values,
    "log_softmax": lambda logits: torch.nn.functional.log_softmax(logits / 2, dim=-1),
    "logsumexp": lambda logits: logits.float().logsumexp(-1).square().sum(),
    "cross_entropy": lambda logits: torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(6).long()),
}


def _classes() -> None:
    """Logits that a plan leaves split, for its loss, are none to predict by."""
    tokens, plan = torch.arange(6).view(2, 3), {"up": "normal", "down": "transposed", "last": "head", "loss": "loss"}
    torch.manual_seed(7)
    serial: Any = Net().double()
    serial.last, serial.loss = nn.Linear(8, 6).double(), nn.CrossEntropyLoss()
    for sizes, layout in itertools.product(({"gx": 2}, {"gy": 2}), ("scattered", "replicated")):
        model = parallelize(copy.deepcopy(serial), Mesh.create(**sizes), plan, Options(layout=layout))
        _, _, logits = model(tokens)
        split = type(logits) is not Tensor
        assert split == (layout == "scattered" or "gx" in sizes)
        for name, function in ACROSS.items() if split else ():
            with pytest.raises(ValueError, match=f"{name} looks across the classes of logits"):
                function(logits)
        logits = torch.max(logits, torch.zeros_like(logits)).softmax(1)
        wanted = serial(tokens)[2].clamp(min=0).softmax(1)
        targets = tokens.flatten()
        found = model.loss(logits.flatten(0, 1), targets) - serial.loss(wanted.flatten(0, 1), targets)
        assert found.abs() < 1e-12


def _all_refusals() -> list[str]:
    _classes()
    _several_passes()
    _arguments_on_shares()
    _shared_uses()
    _called_within()
    _copied_and_changed()
    _penalties()
    _whole_last_layer()
    return _refusals()


def test_a_loss_of_a_share_and_a_parameter_used_on_both_are_refused() -> None:
    for said in run_ranks(_all_refusals, 2):
        assert len(said) == 2 * 3 * len(LOSSES)
        for sentence in said:
            assert "of a rank's share of an activation" in sentence or "across" in sentence, sentence
