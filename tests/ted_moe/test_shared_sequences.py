"""DeepSpeed's MoE layers where ranks share sequences: whole sequences are routed together, with their capacities and losses of balance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ted_moe
from axonn_plugins.config import Ted
from axonn_tp import Grid, LayerPlan, Mesh, layout_of, sync_gradients
from tests.axonn_tp.families import in_float64
from tests.distributed import BACKEND, run_ranks
from tests.matrix import thorough

pytest.importorskip("deepspeed")

WIDTH, WORDS, EXPERTS, SAMPLES, TOKENS = 8, 24, 4, 4, 13
GATES: dict[str, dict[str, Any]] = {
    "first": {"k": 1, "use_rts": False, "capacity_factor": 0.5, "min_capacity": 1},
    "by lot": {"k": 1, "use_rts": True, "capacity_factor": 0.6, "min_capacity": 1},
    "two": {"k": 2, "top2_2nd_expert_sampling": False, "capacity_factor": 0.4, "min_capacity": 1},
    "three": {"k": 3, "capacity_factor": 0.5, "min_capacity": 1},
    "none dropped": {"k": 2, "top2_2nd_expert_sampling": False, "drop_tokens": False},
    "dropless": {"k": 2, "top2_2nd_expert_sampling": False, "drop_tokens": False},
}
GRIDS = (Grid(gz=4, sequence=4), Grid(gz=4, sequence=2), Grid(gx=2, gz=2, sequence=2))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Mixed(nn.Module):
    """Its loss has the layer's."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.words, self.moe, self.head = nn.Embedding(WORDS, WIDTH), moe, nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.words(ids)
        mixed, balance, _ = self.moe(x)
        return F.cross_entropy(self.head(x + mixed).flatten(0, 1), targets.flatten()) + 0.3 * balance


def serial(gate: dict[str, Any], dropless: bool) -> Mixed:
    torch.manual_seed(4)
    return Mixed(ted_moe.MoE(WIDTH, Expert(), EXPERTS, **gate, dropless=dropless)).double()


def compared(grid: Grid, name: str) -> tuple[float, float]:
    """Largest relative difference of loss and gradients from one process's."""
    from deepspeed.moe.layer import MoE

    from axonn_plugins.hosts.deepspeed.ted.on_mesh import split_with_experts

    gate, dropless = GATES[name], name == "dropless"
    mesh, whole = Mesh(grid), serial(gate, dropless)
    ranks = grid.batch
    batch = torch.randint(WORDS, (SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    total = torch.zeros((), dtype=torch.float64)
    for part in batch.chunk(grid.readers):
        loss = whole(part[:, :-1], part[:, 1:]) / grid.readers
        loss.backward()
        total += loss.detach()
    wanted = {name: p.grad for name, p in whole.named_parameters()}

    model = Mixed(MoE(WIDTH, Expert(), EXPERTS, ranks, **gate)).double()
    first, state = mesh.rank("batch") * EXPERTS // ranks, whole.state_dict()

    def outward(key: str) -> str:
        before, experts, after = key.partition(".deepspeed_experts.")
        number, _, rest = after.partition(".")
        return f"{before}{experts}{int(number) + first}.{rest}" if experts else key

    model.load_state_dict({key: state[outward(key)] for key in model.state_dict()})
    plan: Any = {"*": LayerPlan("replicated")}
    split_with_experts(model, mesh, Ted.model_validate({"dropless": dropless}), plan)
    part = mesh.shard_batch(batch)
    loss = model(part[:, :-1], part[:, 1:])
    loss.backward()
    sync_gradients(model.parameters(), mesh)
    worst = 0.0
    for key, parameter in model.named_parameters():
        layout, on = layout_of(parameter), mesh.over(layout_of(parameter).grid)
        expected = wanted[outward(key)]
        there = layout.shard(expected, on.grid, on.coordinates)
        worst = max(worst, ((parameter.grad - there).norm() / expected.norm().clamp(min=1e-12)).item())
    found = loss.detach() / grid.world
    dist.all_reduce(found)
    far = torch.tensor([abs(found / total - 1).item(), worst], dtype=torch.float64)
    dist.all_reduce(far, dist.ReduceOp.MAX)
    mesh.destroy()
    return tuple(far.tolist())


CASES = [(grid, name) for grid in GRIDS for name in GATES]
EACH_ONCE = [(GRIDS[turn % len(GRIDS)], name) for turn, name in enumerate(GATES)]
"""Each gate on one grid, and each grid with two."""


def every(cases: list[tuple[Grid, str]]) -> dict[str, tuple[float, float]]:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(BACKEND)
    with in_float64():
        return {f"{name}, {grid}": compared(grid, name) for grid, name in cases}


@pytest.mark.parametrize("cases", [EACH_ONCE, thorough(CASES)], ids=len)
def test_whole_sequences_are_routed_together(cases: list[tuple[Grid, str]]) -> None:
    found = run_ranks(every, 4, cases)[0]
    assert len(found) == len(cases)
    assert not {case: far for case, far in found.items() if not max(far) <= 1e-10}
