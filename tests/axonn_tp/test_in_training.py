"""The automatic plan sees what a model's code does in training alone, and what it leaves in buffers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from axonn_tp import Grid, auto_plan, place


class Net(nn.Module):
    """A pair on a stream, with something of a script's own between its layers, or in the stream."""

    def __init__(self, between: Callable | None = None, before: Callable | None = None) -> None:
        super().__init__()
        self.table, self.norm, self.up, self.down = (
            nn.Embedding(20, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 12),
            nn.Linear(12, 8),
        )
        self.last = nn.Linear(8, 20)
        self.between, self.before = between, before
        self.register_buffer("largest", torch.tensor(0.01))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.table(tokens)
        normed = self.norm(stream)
        if self.before is not None and self.training:
            normed = self.before(self, normed)
        inner = self.up(normed).tanh()
        if self.between is not None:
            inner = self.between(self, inner)
        return self.last(stream + self.down(inner))


def observed(model: Net, inner: Tensor) -> Tensor:
    with torch.no_grad():
        model.largest.copy_(torch.maximum(model.largest, inner.abs().max()))
    return inner


def observed_in_training(model: Net, inner: Tensor) -> Tensor:
    if model.training:
        model.largest = torch.maximum(model.largest, inner.detach().abs().max())
    return inner


def normalised(model: Net, inner: Tensor) -> Tensor:
    return inner / (1 + inner.norm(dim=-1, keepdim=True)) if model.training else inner


def harmless(model: Net, inner: Tensor) -> Tensor:
    model.calls += 1
    return nn.functional.dropout(inner, 0.5, model.training)


def noisy(model: Net, inner: Tensor) -> Tensor:
    return inner + torch.randn_like(inner) if model.training else inner


def noisy_and_normalised(model: Net, inner: Tensor) -> Tensor:
    return normalised(model, noisy(model, inner))


def noisy_by_width(model: Net, inner: Tensor) -> Tensor:
    return inner + torch.zeros_like(inner).uniform_(-1, 1) / inner.shape[-1] if model.training else inner


def drawn_among_all(model: Net, inner: Tensor) -> Tensor:
    return inner * nn.functional.gumbel_softmax(inner, dim=-1) if model.training else inner


def some_dropped(model: Net, inner: Tensor) -> Tensor:
    kept = inner.new_empty(len(inner), 1, 1).bernoulli_(0.9) / 0.9
    return inner * kept * torch.bernoulli(inner.sigmoid()) if model.training else inner


@pytest.mark.parametrize(
    ("between", "why"),
    [
        (noisy_and_normalised, "in training: the input of down has other values"),
        (noisy_by_width, "in training: the input of down has other values"),
        (drawn_among_all, "in training: the input of down has other values"),
        (some_dropped, ""),
        (observed, "the buffer largest is made of a share"),
        (observed_in_training, "in training: the buffer largest is made of a share"),
        (normalised, "in training: the input of down has other values"),
        (harmless, ""),
        (noisy, ""),
    ],
)
def test_what_a_pair_must_not_do(between: Callable, why: str) -> None:
    plan, report = auto_plan(Net(between).double(), Grid(2, 1, 1, 1), (torch.arange(6).view(2, 3),))
    assert ("up" in plan) == (not why)
    assert not why or why in str(report)
    assert all(not module.training for module in Net().eval().modules())


class Channels(nn.Module):
    """Drops numbers of a token, or of a feature, together, between the layers of a pair and in the stream."""

    def __init__(self, inner: str, stream: str) -> None:
        super().__init__()
        self.table, self.up, self.down, self.last = (
            nn.Embedding(20, 8),
            nn.Linear(8, 12),
            nn.Linear(12, 8),
            nn.Linear(8, 20),
        )
        self.inner, self.stream, self.drop = inner, stream, nn.Dropout1d(0.3)

    def dropped(self, x: Tensor, what: str) -> Tensor:
        if what == "features":
            return self.drop(x.transpose(1, 2)).transpose(1, 2)
        return self.drop(x) if what == "tokens" else x

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.dropped(self.table(tokens), self.stream)
        return self.last(stream + self.down(self.dropped(self.up(stream).tanh(), self.inner)))


def test_channels_that_drop_together_lie_on_one_rank() -> None:
    tokens, found = torch.arange(6).view(2, 3), {}
    for inner, stream in (("", ""), ("tokens", ""), ("features", ""), ("", "tokens"), ("", "features")):
        for grid in (Grid(2), Grid(1, 2)):
            plan, _ = auto_plan(Channels(inner, stream), grid, (tokens,))
            table = plan.get("table")
            found[inner, stream, grid.gx] = (
                "up" in plan,
                table is not None and (grid.gy > 1 or not table.whole_tokens),
            )
    assert {case for case, (pair, _) in found.items() if not pair} == {("tokens", "", 2), ("tokens", "", 1)}
    assert {case for case, (_, split) in found.items() if not split} == {
        ("tokens", "", 2),
        ("tokens", "", 1),
        ("", "tokens", 1),
        ("", "features", 2),
    }


class Hooked(nn.Sequential):
    """A pair whose class does not ask whether it trains; a hook does, or a function that it names."""

    def __init__(self, by: str) -> None:
        super().__init__(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
        if by == "hook":
            self[1].register_forward_hook(lambda module, given, made: normalised(module, made))
        elif by == "attribute":
            self.own = normalised
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        inner = self[1](self[0](x))
        if self.by == "attribute":
            inner = self.own(self, inner)
        return self[2](of_another(self, inner) if self.by == "function" else inner)


def of_another(model: Hooked, inner: Tensor) -> Tensor:
    return inner if model.by != "function" else normalised(model, inner)


@pytest.mark.parametrize("by", ["hook", "attribute", "function", "nothing"])
def test_who_asks_for_training(by: str) -> None:
    plan, report = auto_plan(Hooked(by), Grid(2, 1, 1, 1))
    assert bool(plan) == (by == "nothing")
    assert by == "nothing" or "in training" in str(report)


def test_a_stream_that_is_another_in_training_stays_whole() -> None:
    tokens = torch.arange(6).view(2, 3)
    split, _ = auto_plan(Net().double(), Grid(2, 2, 1, 1), (tokens,))
    whole, report = auto_plan(Net(before=normalised).double(), Grid(2, 2, 1, 1), (tokens,))
    assert "table" in split and "table" not in whole and "up" in whole
    assert "The stream between pairs is whole on every rank" in str(report)


def test_complex_layers_stay_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(4, 4))
    assert [placement.name for placement in place(model, Grid(2, 1, 1, 1))] == ["1"]
    with pytest.raises(ValueError, match="layer 0: complex weights are not split"):
        place(model, Grid(2, 1, 1, 1), {"0": "normal", "1": "transposed"})
