"""What cannot be differentiated rank by rank is refused on every rank: a loss of shares, a parameter used on shares and otherwise."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from axonn_tp import Mesh, Options, layout_of, parallelize, sync_gradients
from tests.axonn_tp.test_auto import Everywhere
from tests.distributed import run_ranks

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda stream, inner: stream.square().mean(),
    "scaled": lambda stream, inner: (stream.var() * 3 + 1) / 4,
    "norm": lambda stream, inner: stream.norm(),
    "beside another": lambda stream, inner: 0.1 * inner.square().mean() + 2.0,
    "of a function": lambda stream, inner: nn.functional.mse_loss(inner, torch.ones_like(inner)),
}


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


def _all_refusals() -> list[str]:
    _shared_uses()
    _whole_last_layer()
    return _refusals()


def test_a_loss_of_a_share_and_a_parameter_used_on_both_are_refused() -> None:
    for said in run_ranks(_all_refusals, 2):
        assert len(said) == 2 * 3 * len(LOSSES)
        for sentence in said:
            assert "of a rank's share of an activation" in sentence or "across" in sentence, sentence
