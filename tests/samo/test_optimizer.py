import copy
from functools import partial

import pytest
import torch
from torch import nn

import samo
from tests.samo.reference import Masked

FACTORIES = {
    "adam": partial(torch.optim.Adam, lr=1e-2, foreach=False),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
}


class Model(nn.Module):
    """Odd sizes, a tied weight, a frozen one, an unused one, an empty one."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(37, 13)
        self.conv = nn.Conv1d(13, 13, 3, padding=1)
        self.inner = nn.Sequential(nn.Linear(13, 29), nn.GELU(), nn.Linear(29, 13))
        self.frozen = nn.Linear(13, 13)
        self.frozen.weight.requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.empty = nn.Parameter(torch.zeros(0, 7))
        self.head = nn.Linear(13, 37, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        hidden = self.table(tokens)
        hidden = hidden + self.conv(hidden.transpose(1, 2)).transpose(1, 2)
        hidden = hidden + self.inner(hidden)
        return self.head(self.frozen(hidden)).float()


def random_masks(model, sparsity, generator):
    return {
        name: torch.rand(p.shape, generator=generator) >= sparsity for name, p in model.named_parameters() if p.dim() > 1
    }


def train(model, step, scale=lambda loss: loss, steps=20, microbatches=1, seed=3):
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        for _ in range(microbatches):
            tokens = torch.randint(37, (4, 9), generator=generator)
            loss = nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            scale(loss).backward()
        step()
        losses.append(float(loss.detach()))
    return losses


def pair(sparsity=0.9, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    model = Model().to(dtype)
    masks = random_masks(model, sparsity, torch.Generator().manual_seed(seed + 1))
    return model, copy.deepcopy(model), masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", FACTORIES)
def test_the_bits_of_masked_dense_training(name, dtype):
    for sparsity in (0.0, 0.5, 0.9, 1.0):
        ours, dense, masks = pair(sparsity, dtype)
        optimizer = samo.Optimizer(FACTORIES[name], ours, masks, tile_size=100)
        reference = Masked(FACTORIES[name], dense, masks)
        assert train(ours, optimizer.step, microbatches=2) == train(dense, reference.step, microbatches=2)
        for (key, mine), theirs in zip(ours.named_parameters(), dense.parameters(), strict=True):
            assert torch.equal(mine, theirs), (key, sparsity)
            assert mine.grad is None
            if key in masks:
                assert torch.count_nonzero(mine[~masks[key]]) == 0


def test_fused_adamw():
    """Its kernel rounds the last elements of a tensor otherwise than the rest, so bits depend on where tensors end."""
    fused = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True)
    ours, dense, masks = pair(0.9)
    mine = train(ours, samo.Optimizer(fused, ours, masks, tile_size=100).step)
    assert mine == pytest.approx(train(dense, Masked(fused, dense, masks).step), rel=1e-5)


def test_clipping_and_loss_scaling():
    for dtype, scale in ((torch.float32, 8.0), (torch.bfloat16, None), (torch.float16, "dynamic")):
        ours, dense, masks = pair(0.8, dtype)
        optimizer = samo.Optimizer(FACTORIES["adamw"], ours, masks, max_norm=0.3, loss_scale=scale, tile_size=64)
        reference = Masked(FACTORIES["adamw"], dense, masks, max_norm=0.3)
        factor = 1.0 if scale is None else optimizer.loss_scale.scale
        mine = train(ours, optimizer.step, optimizer.scale)
        theirs = train(dense, lambda: reference.step(factor), lambda loss: loss * factor)  # noqa: B023
        assert mine == pytest.approx(theirs, rel=1e-5 if dtype is torch.float32 else 2e-2)
