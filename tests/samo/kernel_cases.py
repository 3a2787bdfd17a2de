"""The cases of test_kernels.py: the kernels against the torch version, and what makes them step aside."""

import copy
import os
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

import samo
from axonn_plugins.optim.index import BLOCK, Index
from samo import fused, kernels
from tests.matrix import thorough

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="neither a GPU nor the interpreter")
LOW = (torch.bfloat16, torch.float16)
FACTORIES = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1, betas=(0.3, 0.99)),
    "adamw-fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
}


def rounded(values, dtype):
    """As the kernels round: to nearest, but the interpreter truncates to bf16."""
    if dtype is torch.bfloat16 and INTERPRETED:
        return (values.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return values.to(dtype)


def random_masks(generator):
    last = torch.zeros(BLOCK + 1, dtype=torch.bool)
    last[-1] = True
    holes = torch.rand(3 * BLOCK + 11, generator=generator) >= 0.97
    holes[BLOCK : 2 * BLOCK] = False
    return {
        "holes": holes,
        "last": last,
        "none": torch.zeros(5, dtype=torch.bool),
        "all": torch.ones(1500, dtype=torch.bool),
    }


@runs
@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        (torch.float32, "offsets"),
        thorough(torch.float32, "positions"),
        thorough(torch.bfloat16, "offsets"),
        (torch.bfloat16, "positions"),
        (torch.float16, "offsets"),
        thorough(torch.float16, "positions"),
    ],
)
def test_compress_is_that_of_the_index(dtype, form):
    generator = torch.Generator().manual_seed(0)
    for name, mask in random_masks(generator).items():
        index = Index.from_mask(mask.to(DEVICE), form)
        dense, more = (torch.randn(mask.numel(), generator=generator).to(DEVICE, dtype) for _ in range(2))
        into = torch.full((index.kept + 5,), 7.0, dtype=dtype, device=DEVICE)
        kernels.compress(dense, index, into, 3, accumulate=False)
        assert torch.equal(into[3:-2], index.compress(dense)), name
        kernels.compress(more, index, into, 3, accumulate=True)
        assert torch.equal(into[3:-2], rounded(index.compress(dense).float() + index.compress(more).float(), dtype)), (
            name
        )
        assert (into[:3] == 7).all() and (into[-2:] == 7).all()


def test_programs_share_all_kept_elements():
    for mask in random_masks(torch.Generator().manual_seed(1)).values():
        for form in ("offsets", "positions"):
            index = Index.from_mask(mask, form)
            for begin, end in ((0, index.kept), (index.kept // 3, index.kept // 2)):
                found = []
                for first, count, base in kernels.split(index, begin, end - begin, torch.device("cpu")).tolist():
                    stored = index.tensors[0][begin + first : begin + first + count].long()
                    assert 0 < count <= kernels.CHUNK
                    found += (stored + (base if form == "offsets" else 0)).tolist()
                assert found == index.positions(begin, end).tolist()


class Model(nn.Module):
    """More than one block, small, kept whole, pruned whole, empty, unused."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Parameter(torch.randn(2, BLOCK + 77))
        self.matrix = nn.Parameter(torch.randn(37, 41))
        self.bias = nn.Parameter(torch.randn(1300))
        self.gone = nn.Parameter(torch.randn(9, 9))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.randn(11))


def make(factory, dtype=torch.bfloat16, form="auto", **options):
    """Two equal models and their optimizers, with the kernels and without."""
    torch.manual_seed(2)
    models = [Model().to(DEVICE, dtype)]
    models.append(copy.deepcopy(models[0]))
    sparsity = {"blocks": 0.95, "matrix": 0.5, "gone": 1.0}
    masks = {name: torch.rand(getattr(models[0], name).shape) >= value for name, value in sparsity.items()}
    with mock.patch.object(
        Index, "from_mask", lambda mask: Index(mask.reshape(-1).nonzero().reshape(-1), mask.numel(), form)
    ):
        return [
            (model, samo.Optimizer(factory, model, masks, kernels=used, tile_size=5000, **options))
            for model, used in zip(models, (True, False), strict=True)
        ]


def step(both, generator, scale=1.0, passes=1, without=("unused",)):
    """The same gradients to both, and a step of each."""
    for _ in range(passes):
        gradients = {
            n: torch.randn(p.shape, generator=generator) for n, p in both[0][0].named_parameters() if n not in without
        }
        for model, _ in both:
            used = [getattr(model, name) for name in gradients]
            given = [(g * scale).to(p) for g, p in zip(gradients.values(), used, strict=True)]
            torch.autograd.backward(used, given)
    for _, optimizer in both:
        optimizer.step()


def assert_close(ours, theirs, rtol=2e-6):
    """State to float32 rounding, parameters exactly what the state says."""
    (model, optimizer), (reference, plain) = ours, theirs
    mine, expected = optimizer.state_dict(), plain.state_dict()
    assert mine["param_groups"] == expected["param_groups"] and mine["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert mine["state"][number].keys() == state.keys()
        for key, value in state.items():
            found = mine["state"][number][key]
            assert found.dtype == value.dtype and found.device == value.device
            torch.testing.assert_close(found, value, rtol=rtol, atol=rtol)
    for number, (parameter, other) in enumerate(zip(model.parameters(), reference.parameters(), strict=True)):
        entry = next(entry for entry in optimizer.entries if entry.parameter is parameter)
        if parameter.dtype is torch.float32:
            torch.testing.assert_close(parameter, other, rtol=rtol, atol=rtol)
        elif "step" in mine["state"][number]:
            assert torch.equal(parameter, entry.dense(rounded(mine["state"][number]["master"], parameter.dtype))), (
                entry.name
            )


@runs
@pytest.mark.parametrize(
    ("name", "dtype", "form"),
    [
        thorough("adamw", torch.bfloat16, "offsets"),
        ("adam", torch.bfloat16, "positions"),
        thorough("adamw-fused", torch.bfloat16, "auto"),
        ("adamw", torch.float16, "offsets"),
        thorough("adam", torch.float32, "offsets"),
        ("adamw-fused", torch.float32, "positions"),
    ],
)
def test_steps_are_torchs(name, dtype, form):
    generator = torch.Generator().manual_seed(3)
    both = make(FACTORIES[name], dtype, form, max_norm=1.0, loss_scale=16.0)
    for number in range(3):
        for _, optimizer in both:
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + number)
        step(both, generator, scale=16.0)
    assert len(both[0][1]._plans) == 1 and not both[1][1]._plans
    assert not both[0][1].buffers.nbytes
    assert_close(*both)
    for model, _ in both:
        assert not torch.count_nonzero(model.gone)


@runs
def test_torch_and_the_kernels_take_turns():
    generator = torch.Generator().manual_seed(4)
    both = make(FACTORIES["adamw"])
    for used in (True, False, False, True, True):
        both[0][1].kernels = used
        step(both, generator)
    assert_close(*both)
    assert both[0][1].state_dict()["state"][0]["step"] == 5
    # A checkpoint of either continues with the other.
    ours, theirs = both[0][1].state_dict(), copy.deepcopy(both[1][1].state_dict())
    both[1][1].load_state_dict(copy.deepcopy(ours))
    both[0][1].load_state_dict(theirs)
    step(both, generator)
    assert_close(*both, rtol=1e-5)
    masks = {"matrix": torch.rand(both[0][0].matrix.shape) >= 0.8}
    for _, optimizer in both:
        optimizer.prune(masks)
    step(both, generator)
    assert_close(*both, rtol=1e-5)


@runs
@pytest.mark.parametrize("name", [thorough("adamw"), "adamw-fused"])
def test_parameters_that_have_gradients_in_some_steps(name):
    """Counts differ; one is written in place, and moments are replaced."""
    generator = torch.Generator().manual_seed(7)
    both = make(FACTORIES[name])
    for without in (("unused",), ("bias", "matrix"), ("bias", "matrix"), (), ("blocks",), ()):
        step(both, generator, without=without)
    assert_close(*both)
    for _, optimizer in both:
        for state in optimizer.inner.state.values():
            state["step"] += 3
    step(both, generator, without=())
    for _, optimizer in both:
        for state in optimizer.inner.state.values():
            state["exp_avg"] = state["exp_avg"] * 0.5
    step(both, generator, without=())
    assert_close(*both)


@runs
def test_accumulation_in_float32():
    generator = torch.Generator().manual_seed(5)
    both = make(FACTORIES["adam"], torch.float32)
    for _ in range(2):
        step(both, generator, passes=2)
    assert_close(*both)


@runs
@pytest.mark.parametrize(
    "factory",
    [
        partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
        partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
        partial(torch.optim.Adam, lr=1e-2, maximize=True),
        partial(torch.optim.AdamW, lr=torch.tensor(1e-2), foreach=False),
    ],
)
def test_what_the_kernels_do_not_know_torch_does(factory):
    generator = torch.Generator().manual_seed(6)
    both = make(factory, torch.float32)
    assert not fused.knows(both[0][1].inner)
    step(both, generator)
    for mine, expected in zip(both[0][0].parameters(), both[1][0].parameters(), strict=True):
        assert torch.equal(mine, expected)
