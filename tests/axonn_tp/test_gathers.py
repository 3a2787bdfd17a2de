"""Weights gathered over z are those that the forward pass at hand computes with, whatever passes lie between."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import axonn_tp
from axonn_plugins.observe.ledger import Ledger
from axonn_tp import Grid, Mesh, Options
from axonn_tp.plan.placement import place
from tests.axonn_tp.test_grids import largest_error
from tests.distributed import run_ranks

OPTIONS = {
    "plain": Options(),
    "resharded": Options(reshard_after_forward=True),
    "half": Options(reshard_after_forward=0.5),
    "cached": Options(cache_gathers="all"),
}


class Two(nn.Module):
    """Two layers, recomputed or not, or computed with other weights than their own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.one, self.other = nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "recomputed":
            return checkpoint(self.inner, x, use_reentrant=False)
        if self.how == "selective":
            # What is gathered ahead, and in which region, is another in each pass.
            saved = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
            first = checkpoint(self.one, x, use_reentrant=False, context_fn=saved)
            return checkpoint(self.second, first, use_reentrant=False, context_fn=saved)
        if self.how == "adapted":
            # One layer computes with weights made of its own, as in meta-learning, and then with its own.
            adapted = {name: 2 * p for name, p in self.one.named_parameters()}
            first = functional_call(self.one, adapted, (x,))
            return self.other(torch.tanh(first)) + self.inner(x)
        return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return self.second(self.one(x))

    def second(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(x))


def between() -> Iterator[tuple[str, float]]:
    """Errors of gradients where an evaluation in lower precision lies between forward and backward."""
    mesh = Mesh.create(1, 1, 2)
    x = torch.randn(4, 6)
    for how in ("plain", "recomputed", "selective", "adapted"):
        for name, options in OPTIONS.items():
            torch.manual_seed(2)
            serial = Two(how)
            parallel = axonn_tp.parallelize(copy.deepcopy(serial), mesh, {}, options)
            for number in range(2):
                for model, mine in ((serial, x), (parallel, mesh.shard_batch(x))):
                    model.zero_grad()
                    loss = model(mine).square().mean()
                    for passes in (torch.no_grad, torch.enable_grad):
                        with torch.autocast("cpu", torch.bfloat16), passes():
                            model(mine)
                    loss.backward()
                axonn_tp.sync_gradients(parallel.parameters(), mesh)
                error = largest_error(serial, parallel, mesh, lambda p: p.grad)
                yield f"{how} {name} step {number}", error


def evaluated_between() -> dict[str, float]:
    torch.manual_seed(dist.get_world_size())
    return dict(between())


def test_another_pass_between_forward_and_backward_changes_nothing() -> None:
    for found in run_ranks(evaluated_between, 2):
        # Float32, in which bfloat16's roundings would show as 1e-3.
        assert not {case: error for case, error in found.items() if not error < 2e-6}


def changed_between() -> str:
    """A weight that changes after the forward that used it."""
    mesh = Mesh.create(1, 1, 2)
    model = axonn_tp.parallelize(Two("plain"), mesh, {}, Options(reshard_after_forward=True))
    x = torch.randn(4, 6, requires_grad=True)
    loss = model(x).square().mean()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_weight_that_changed_after_its_forward_is_refused_as_by_torch() -> None:
    assert all("modified by an inplace operation" in message for message in run_ranks(changed_between, 2))


class Several(nn.Module):
    """Five equal layers, of which one is frozen, one is called at times only, and one twice."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))
        self.layers[1].weight.requires_grad_(False)

    def forward(self, x: Tensor, everything: bool) -> Tensor:
        if self.recomputed:
            return checkpoint(self.inner, x, everything, use_reentrant=False)
        return self.inner(x, everything)

    def inner(self, x: Tensor, everything: bool) -> Tensor:
        for number in (0, 1, 2, 3, 4, 0):
            x = x if number == 3 and not everything else torch.tanh(self.layers[number](x))
        return x


BLOCK = 8 * 8 * 8
"""Bytes of a layer's weight in float64."""


KINDS = ("all_gather", "reduce_scatter")


def in_buckets() -> Iterator[tuple[str, float, list, list]]:
    """By how many layers share calls: errors of gradients, which layers have none, and calls and elements of steps of two microbatches."""
    mesh = Mesh.create(1, 1, 2)
    x = torch.randn(2, 4, 8)
    for name, options in OPTIONS.items():
        for together in (0, 2, 5):
            for recomputed in (False, True) if name != "plain" else (False,):
                torch.manual_seed(2)
                serial = Several(recomputed)
                chosen = replace(options, bucket_bytes=together * BLOCK)
                parallel = axonn_tp.parallelize(copy.deepcopy(serial), mesh, {}, chosen)
                error, absent, calls = 0.0, [], []
                for everything in (True, True, False, False):
                    with Ledger(mesh.axis_names()) as ledger:
                        for model, mine in ((serial, x), (parallel, [mesh.shard_batch(part) for part in x])):
                            model.zero_grad()
                            for part in mine:
                                model(part, everything).square().mean().backward()
                    axonn_tp.sync_gradients(parallel.parameters(), mesh)
                    absent.append([n for n, layer in enumerate(parallel.layers) if layer.weight.grad is None])
                    error = max(error, largest_error(serial, parallel, mesh, lambda p: p.grad))
                    made = {kind: [c.elements for c in ledger.collectives if c.op == kind] for kind in KINDS}
                    calls.append([(len(elements), sum(elements)) for elements in made.values()])
                yield f"{name} {recomputed} {together}", error, absent, calls


def of_buckets() -> list:
    torch.manual_seed(dist.get_world_size())
    torch.set_default_dtype(torch.float64)
    return list(in_buckets())


def test_layers_that_share_calls_get_the_same_gradients_for_the_same_bytes() -> None:
    for found in run_ranks(of_buckets, 2):
        for case, error, absent, _ in found:
            assert error < 1e-10, case
            assert absent == [[1], [1], [1, 3], [1, 3]], case
        steps = {case: calls for case, _, _, calls in found}
        for case, calls in steps.items():
            alone = steps[f"{case.rpartition(' ')[0]} 0"]
            # Recomputed layers are asked for in two orders: what is gathered last may be for naught.
            allowed = 32 * {"resharded True": 2, "half True": 4}.get(case.rpartition(" ")[0], 0)
            for (gathers, sums), (gathers_alone, sums_alone) in zip(calls, alone, strict=True):
                assert sums[1] == sums_alone[1] and gathers[1] <= gathers_alone[1] + allowed, case
        # A layer's second gradient is waited for at once; its second gather is alone.
        assert [[calls for calls, _ in step] for step in steps["plain False 0"]] == [
            [14, 10],
            [14, 10],
            [13, 8],
            [12, 8],
        ]
        assert [[calls for calls, _ in step] for step in steps["plain False 2"]] == [[12, 6], [10, 6], [9, 6], [8, 6]]
        assert [[calls for calls, _ in step] for step in steps["plain False 5"]] == [[10, 4], [6, 4], [6, 4], [6, 4]]


def resharded_in_part() -> list[tuple[float, int]]:
    """Error of a step's gradients and elements gathered in it, by the share of weights that is let go."""
    torch.manual_seed(dist.get_world_size())
    torch.set_default_dtype(torch.float64)
    mesh = Mesh.create(1, 1, 2)
    serial = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(5)))
    x, found = torch.randn(4, 6, requires_grad=True), []
    serial(x).square().mean().backward()
    for share in (False, 0.25, 0.4, 0.5, 0.8, 1, True):
        torch.manual_seed(0)
        model = copy.deepcopy(serial)
        model.zero_grad()
        axonn_tp.parallelize(model, mesh, {}, Options(reshard_after_forward=share))
        with Ledger(mesh.axis_names()) as ledger:
            model(mesh.shard_batch(x)).square().mean().backward()
        axonn_tp.sync_gradients(model.parameters(), mesh)
        gathered = sum(one.elements for one in ledger.collectives if one.op == "all_gather")
        found.append((largest_error(serial, model, mesh, lambda p: p.grad), gathered))
    return found


def test_a_share_of_the_weights_is_gathered_again() -> None:
    for found in run_ranks(resharded_in_part, 2):
        assert all(error < 1e-10 for error, _ in found)
        assert [gathered for _, gathered in found] == [18 * layers for layers in (5, 7, 7, 8, 9, 10, 10)]


def test_the_last_layers_that_fit_keep_their_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 16), nn.Linear(16, 20), nn.Linear(20, 4), nn.LayerNorm(4))
    for share, kept in ((0.0, "0123"), (0.1, "023"), (0.5, "013"), (0.69, "13"), (0.9, "0"), (1.0, "")):
        placed = place(model, Grid(1, 1, 2, 1), {}, Options(reshard_after_forward=share))
        assert "".join(one.name for one in placed if not one.options.reshard_after_forward) == kept, share


@pytest.mark.parametrize("share", [-0.1, 1.5, 2, float("nan"), "half", None])
def test_a_share_that_is_none_is_refused(share: Any) -> None:
    with pytest.raises(ValueError, match="reshard_after_forward = .* is neither true, false nor a share"):
        Options(reshard_after_forward=share)


class Tied(nn.Module):
    """Reads a layer's weight in its forward."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer.weight.shape, self.layer(x).shape


class Clamping(Tied):
    """Changes a weight in its forward, as models do whose weights are to be positive."""

    limit, how = 9.0, ""

    def forward(self, x: Tensor) -> Tensor:
        assert (x @ self.layer.weight.t()).shape == self.layer(x).shape
        held = self.layer.weight.data
        if self.how == "row":
            held[0].zero_()
        if self.how == "assigned":
            self.layer.weight.data = nn.functional.normalize(held, dim=1)
        if self.how == "several":
            torch._foreach_mul_([torch.ones(2), held], 0.5)
        if self.how == "out":
            torch.mul(held.clone(), 0.5, out=held)
        self.layer.weight.data.clamp_(-self.limit, self.limit)
        return self.layer(x)


def shapes() -> list[tuple[int, ...]]:
    """Of a weight inside and outside of its model's forward, while another model of the mesh runs; one that changes it is refused."""
    mesh = Mesh.create(2)
    model: Any = axonn_tp.parallelize(Tied(nn.Linear(4, 6)), mesh)
    other = axonn_tp.parallelize(Tied(nn.Linear(4, 6)), mesh)
    found = [tuple(model(torch.randn(2, 4))[0])]
    other.register_forward_pre_hook(lambda *_: found.append(tuple(model.layer.weight.shape)))
    other(torch.randn(2, 4))
    clamping: Any = axonn_tp.parallelize(Clamping(nn.Linear(4, 6)), mesh)
    clamping(torch.randn(2, 4))
    for limit, how in ((0.01, ""), (9.0, "row"), (9.0, "assigned"), (9.0, "several"), (9.0, "out")):
        clamping.limit, clamping.how = limit, how
        with pytest.raises(ValueError, match="changes the weight of layer layer, which is split"):
            clamping(torch.randn(2, 4))
    return found


def test_only_its_own_models_forward_makes_a_weight_whole() -> None:
    for inside, outside in run_ranks(shapes, 2):
        assert inside == (6, 4) and outside != inside


class Shrinking(Two):
    """Changes its weights where its forward begins, or between its layers."""

    def __init__(self, late: bool, counted: bool) -> None:
        super().__init__("plain")
        self.late, self.counted = late, counted

    def shrink(self) -> None:
        for parameter in self.parameters():
            (parameter if self.counted else parameter.data).mul_(0.9)

    def second(self, x: Tensor) -> Tensor:
        if self.late:
            with torch.no_grad():
                self.shrink()
        return super().second(x)

    def forward(self, x: Tensor) -> Tensor:
        if not self.late:
            with torch.no_grad():
                self.shrink()
        return super().forward(x)


def shrunk(late: bool, counted: bool) -> float:
    """Largest error of four outputs."""
    mesh = Mesh.create(1, 1, 2)
    torch.manual_seed(0)
    serial = Shrinking(late, counted).double()
    split = axonn_tp.parallelize(copy.deepcopy(serial), mesh, {})
    errors = []
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(4, 6, dtype=torch.float64)
            errors.append(float((split(mesh.shard_batch(x)) - mesh.shard_batch(serial(x))).abs().max()))
    return max(errors)


def weights_that_change_on_their_way() -> list[float]:
    for late in (False, True):
        with pytest.raises(ValueError, match="changes the weight of layer (one|other) by .data"):
            shrunk(late, counted=False)
    return [shrunk(late, counted=True) for late in (False, True)]


def test_a_weight_that_changes_on_its_way_is_sent_anew_or_refused() -> None:
    assert all(error < 1e-10 for errors in run_ranks(weights_that_change_on_their_way, 2) for error in errors)
