"""Dropout: identical on replicas, independent on shares, the same when a block is run again."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import axonn_tp
from axonn_tp import LayerPlan, Mesh, Options
from tests.distributed import run_ranks
from tests.matrix import thorough

ROWS, WIDTH = 64, 32


class Drops(nn.Module):
    """Ones in, so that what each dropout dropped can be read off: inside a pair, by module and by function."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.inner, self.outer = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(),
            nn.Dropout(),
        )
        self.seen: list[bytes] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        masks = [self.inner(torch.ones_like(hidden)), F.dropout(torch.ones_like(hidden), training=self.training)]
        x = self.down(hidden * masks[0] * masks[1])
        masks.append(self.outer(torch.ones_like(x)))
        self.seen += [mask.detach().numpy().tobytes() for mask in masks]
        return x * masks[2]


PLAN = {"up": LayerPlan("normal"), "down": LayerPlan("transposed")}


def masks(layout: str, reentrant: bool | None) -> tuple[dict[str, int], list[list[bytes]]]:
    """This rank's place, and its masks of two steps; each step's are taken again in recomputation."""
    mesh = Mesh.create(2, 2, dist.get_world_size() // 4)
    torch.manual_seed(0)
    model = axonn_tp.parallelize(Drops(), mesh, PLAN, Options(layout=layout))
    steps = []
    for _ in range(2):
        x = torch.ones(1, ROWS, WIDTH, requires_grad=True)
        output = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
        output.sum().backward()
        steps.append(model.seen)
        model.seen = []
    return mesh.coordinates, steps


def differing_axes(found: list, step: int, which: int) -> set[str]:
    """Axes along which two ranks that differ in nothing else dropped different elements."""
    axes = set()
    for place, steps in found:
        for other, others in found:
            changed = [axis for axis in place if place[axis] != other[axis]]
            if len(changed) == 1 and steps[step][which] != others[step][which]:
                axes.add(changed[0])
    return axes


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [(4, ["replicated"]), (8, ["scattered"]), thorough(8, ["replicated"])],
)
def test_masks_are_the_same_on_replicas_only(ranks: int, layouts: list[str]) -> None:
    for layout in layouts:
        inside = {"replicated": {"x", "z"}, "scattered": {"x", "y", "z"}}[layout]
        found = run_ranks(masks, ranks, layout, None)
        inside = inside - {"z"} if ranks == 4 else inside
        for step in (0, 1):
            assert differing_axes(found, step, 0) == inside
            assert differing_axes(found, step, 1) == inside
            # The stream of this plan is whole on x and y, and all ranks were seeded alike.
            assert differing_axes(found, step, 2) == set()
        for which in (0, 1, 2):
            assert found[0][1][0][which] != found[0][1][1][which], "steps drop the same"


@pytest.mark.parametrize("ranks", [4, thorough(8)])
def test_recomputation_drops_the_same(ranks: int) -> None:
    for reentrant in (True, False):
        for _, steps in run_ranks(masks, ranks, "scattered", reentrant):
            for seen in steps:
                again = seen[3:]
                assert again and seen[: len(again)] == again


def stream_and_serial_draws() -> tuple[dict[str, int], bytes, float]:
    """The mask in a split residual stream, and how far a model without dropout leaves the random state."""
    from axonn_recipes.models.gpt import GPT, GPTConfig
    from tests.axonn_tp.test_grids import gpt_plan

    class Dropping(GPT):
        def __init__(self, config: GPTConfig) -> None:
            super().__init__(config)
            self.drop = nn.Dropout()

        def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
            self.mask = self.drop(torch.ones_like(self.tokens(ids)))
            return super().forward(ids, targets)

    mesh = Mesh.create(2, 2, 1)
    torch.manual_seed(1)
    plain = GPT(GPTConfig(50, 8, 2, 4, 24))
    dropping = axonn_tp.parallelize(Dropping(GPTConfig(50, 8, 2, 4, 24)), mesh, gpt_plan(4))
    ids = torch.randint(50, (2, 8))
    dropping(ids, ids)
    parallel = axonn_tp.parallelize(copy.deepcopy(plain), mesh, gpt_plan(4))
    torch.manual_seed(2)
    parallel(ids, ids).backward()
    after = torch.rand(()).item()
    torch.manual_seed(2)
    return mesh.coordinates, dropping.mask.numpy().tobytes(), after - torch.rand(()).item()


def test_in_a_scattered_stream_every_rank_drops_for_itself() -> None:
    found = run_ranks(stream_and_serial_draws, 4)
    masks_seen = [mask for _, mask, _ in found]
    for number, mask in enumerate(masks_seen):
        assert mask not in masks_seen[:number]
    assert [difference for *_, difference in found] == [0.0] * 4
