"""A module that needs whole activations, in a stream that is split in every way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import axonn_tp
from axonn_tp import Grid, Mesh, Options, factorisations, layout_of
from axonn_tp.checkpoint.whole import assemble
from axonn_tp.layers.boundary import share_again, whole_activation
from tests.distributed import meshes, run_ranks
from tests.matrix import thorough

FEATURES, TOKENS = 8, 5
PLAN = {"tokens": "embedding", "norm": "norm", "up": "normal", "down": "transposed", "head": "head"}


class Mixer(nn.Module):
    """Looks at all features, and at the tokens before."""

    mesh: Mesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is None:
            return self.mixed(x)
        return share_again(self.mixed(whole_activation(x, self.mesh, FEATURES)), x, self.mesh)

    def mixed(self, x: Tensor) -> Tensor:
        return torch.tanh(
            x + x.mean(-1, keepdim=True) * x.unflatten(-2, (-1, TOKENS)).cumsum(-2).flatten(-3, -2)[..., :1]
        )


class Model(nn.Module):
    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.tokens, self.norm, self.mixer, self.flat = (
            nn.Embedding(11, FEATURES),
            nn.LayerNorm(FEATURES),
            Mixer(),
            flat,
        )
        self.up, self.down = nn.Linear(FEATURES, 16), nn.Linear(16, FEATURES)
        self.head = nn.Linear(FEATURES, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x.flatten(0, 1) if self.flat else x
        x = x + self.mixer(self.norm(x))
        x = x + self.mixer(self.down(torch.relu(self.up(x))))
        return self.head(x).square().mean()


def differences(flat: bool, options: Options, grids: list[Grid]) -> Iterator[float]:
    torch.manual_seed(1)
    serial, ids = Model(flat).double(), torch.randint(11, (8, TOKENS))
    parallel = copy.deepcopy(serial)
    serial(ids).backward()
    for mesh in meshes(grids):
        model = copy.deepcopy(parallel)
        model.mixer.mesh = mesh
        axonn_tp.parallelize(model, mesh, PLAN, options)
        model(mesh.shard_batch(ids)).backward()
        axonn_tp.sync_gradients(model.parameters(), mesh)
        for ours, theirs in zip(model.parameters(), serial.parameters(), strict=True):
            shares = [torch.empty_like(ours) for _ in range(4)]
            dist.all_gather(shares, ours.grad)
            yield (assemble(shares, layout_of(ours), mesh)[0] - theirs.grad).abs().max().item()


CASES = [(flat, layout) for flat in (False, True) for layout in ("scattered", "replicated")]


def everywhere(turns: int) -> Any:
    """Each case on each grid, or, where there are turns, on a part of them."""
    grids = list(factorisations(4))
    return {
        (flat, layout): max(differences(flat, Options(layout=layout), grids[place % turns :: turns]))
        for place, (flat, layout) in enumerate(CASES)
    }


@pytest.mark.parametrize("turns", [3, thorough(1)])
def test_gradients_are_those_of_one_process(turns: int) -> None:
    for found in run_ranks(everywhere, 4, turns):
        assert max(found.values()) < 1e-12, found


def in_a_pair() -> str:
    mesh = Mesh(Grid(2))
    model = Model(False)
    model.mixer.mesh = mesh
    model.down = model.mixer
    axonn_tp.parallelize(model, mesh, {"tokens": "embedding", "up": "normal"})
    with pytest.raises(ValueError) as caught:
        model(torch.zeros(2, TOKENS, dtype=torch.long))
    with pytest.raises(ValueError, match="has 4 features on all ranks together, expected 8"):
        whole_activation(torch.zeros(2, 4), mesh, FEATURES)
    return str(caught.value)


def test_between_the_layers_of_a_pair_is_no_stream() -> None:
    for message in run_ranks(in_a_pair, 2):
        assert "has its features split over x, as between the layers of a pair" in message
