"""The compiled step against torch's tiles."""

import copy
from functools import partial

import pytest
import torch

import samo
from axonn_plugins.optim.index import Index
from samo.native import library
from tests.samo.reference import Masked
from tests.samo.test_optimizer import FACTORIES, pair, train

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_equals_the_tiles(kind, dtype, monkeypatch) -> None:
    fused = partial(kind, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), fused=True)
    for sparsity in (0.0, 0.7, 1.0):
        ours, other, masks = pair(sparsity, dtype)
        native = samo.Optimizer(fused, ours, masks, max_norm=0.5, tile_size=100)
        assert native._native is not None
        monkeypatch.setattr("samo.optimizer.native_step", lambda *_: None)
        tiles = samo.Optimizer(fused, other, masks, max_norm=0.5, tile_size=64)
        monkeypatch.undo()
        mine, theirs = train(ours, native.step, microbatches=2), train(other, tiles.step, microbatches=2)
        assert mine == pytest.approx(theirs, rel=1e-5 if dtype is torch.float32 else 1e-2)
        for name, parameter in ours.named_parameters():
            assert name not in masks or torch.count_nonzero(parameter[~masks[name]]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_tensors_in_both_forms(dtype) -> None:
    """Several blocks and jobs, one of them in the middle of a block; a single step, in float64 by hand."""
    generator = torch.Generator().manual_seed(0)
    numel = 5 * 2**16 + 333
    mask = torch.rand(numel, generator=generator) < 0.6
    mask[2**16 : 2**17] = False
    start, gradient = torch.randn(2, numel, generator=generator).to(dtype)
    expected = start.double()
    moved = gradient.double()[mask]
    expected = torch.where(mask, expected * (1 - 1e-2 * 0.1), 0)
    expected[mask] -= 1e-2 * moved / (moved.abs() + 1e-8)
    for form in ("offsets", "positions"):
        parameter = torch.nn.Parameter(start.clone())
        fused = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True)
        optimizer = samo.Optimizer(fused, [parameter], {"0": mask}, tile_size=100_000)
        optimizer.entries[0].index = Index.from_mask(mask, form)
        parameter.grad = gradient.clone()
        optimizer.step()
        assert optimizer._native is not None
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compression_of_large_tensors(dtype) -> None:
    """The same bits as torch's gather and sum."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(7 * 2**16 + 33, generator=generator) < 0.3
    mask[2**16 : 3 * 2**16] = False
    first, second = torch.randn(2, mask.numel(), generator=generator).to(dtype)
    for form in ("offsets", "positions"):
        parameter = torch.nn.Parameter(torch.zeros(mask.numel(), dtype=dtype))
        optimizer = samo.Optimizer(partial(torch.optim.Adam, fused=True), [parameter], {"0": mask})
        optimizer.entries[0].index = Index.from_mask(mask, form)
        for gradient, expected in ((first, first), (second, first + second)):
            parameter.backward(gradient)
            assert torch.equal(optimizer.stores[0].gradient, expected[mask])


def test_a_state_of_before_the_first_step_and_groups_that_change_are_obeyed() -> None:
    """As where a search for a learning rate puts back what there was, and where a script turns training round."""
    fused = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True)
    ours, dense, masks = pair(0.5)
    optimizer, reference = samo.Optimizer(fused, ours, masks), Masked(fused, dense, masks)
    start = copy.deepcopy((ours.state_dict(), optimizer.state_dict()))
    first = train(ours, optimizer.step)
    ours.load_state_dict(start[0])
    optimizer.load_state_dict(start[1])
    assert train(ours, optimizer.step) == first == pytest.approx(train(dense, reference.step), rel=1e-5)
    for maximize in (True, False):
        optimizer.param_groups[0]["maximize"] = reference.optimizer.param_groups[0]["maximize"] = maximize
        mine, theirs = (train(*each, steps=3) for each in ((ours, optimizer.step), (dense, reference.step)))
        assert mine == pytest.approx(theirs, rel=1e-4)
    steps = {float(state["step"]) for state in optimizer.state_dict()["state"].values() if "step" in state}
    assert steps == {14.0}


def test_only_where_it_applies() -> None:
    ours, _, masks = pair()
    assert samo.Optimizer(FACTORIES["adamw"], copy.deepcopy(ours), masks)._native is None
    amsgrad = partial(torch.optim.Adam, fused=True, amsgrad=True)
    assert samo.Optimizer(amsgrad, copy.deepcopy(ours), masks)._native is None
    fused = partial(torch.optim.Adam, fused=True)
    assert samo.Optimizer(fused, copy.deepcopy(ours).double(), masks)._native is None
