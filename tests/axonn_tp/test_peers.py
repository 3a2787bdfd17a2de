"""3D PMM's special cases beside torch's own systems: only z is FSDP, z and data HSDP, only x column and row parallelism.

Losses are the same, and so are the bytes that a rank sends. An all-reduce of n elements counts as the reduce-scatter and
the all-gather that it is made of. Calls differ where FSDP2 lays the parameters of a module together; where each module has
one parameter they are the same.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import axonn_tp
from axonn_plugins.observe.ledger import Ledger
from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_tp import Grid, LayerPlan, Mesh, Options
from axonn_tp.comm.same_on_replicas import leave_to_host
from tests.axonn_tp.test_grids import TOLERANCE, gpt_plan
from tests.distributed import run_ranks
from tests.matrix import thorough

RANKS, STEPS = 4, 2
# FSDP2 pads dim 0 of each parameter to a multiple of the ranks, we the flat block: nothing is padded in these sizes.
CONFIG = GPTConfig(vocabulary=32, context=8, layers=2, heads=4, hidden=16)
GRIDS = {"FSDP": Grid(gz=4), "HSDP": Grid(gz=2, gdata=2)}
Sent = dict[str, tuple[int, Fraction]]


def by_kind(ledger: Ledger) -> Sent:
    """Calls and bytes by operation."""
    found: Sent = {}
    for entry in ledger.entries:
        calls, sent = found.get(entry.collective.op, (0, Fraction(0)))
        found[entry.collective.op] = (calls + 1, sent + entry.sent)
    return found


def total(sent: Sent) -> Fraction:
    """All bytes."""
    return sum((size for _, size in sent.values()), Fraction(0))


def train(model: nn.Module, loss: Callable[[], Tensor], sync: Callable[[], None] = lambda: None) -> tuple[list, Sent]:
    """The loss of every step, meaned over the ranks, and what one rank sent in the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with Ledger() as ledger:
            value = loss()
            value.backward()
            sync()
        optimizer.step()
        mean = value.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / RANKS)
    assert not ledger.unknown
    return losses, by_kind(ledger)


def stack(bias: bool) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(8, 8, bias) for _ in range(3))).double()


def gpt(bias: bool) -> nn.Module:
    torch.manual_seed(1)
    return GPT(CONFIG).double()


def stack_loss(model: nn.Module, share: Callable[[Tensor], Tensor], wants_input: bool = True) -> Callable[[], Tensor]:
    rows = share(torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
    rows.requires_grad_(wants_input)
    return lambda: model(rows).square().mean()


def gpt_loss(model: nn.Module, share: Callable[[Tensor], Tensor], wants_input: bool = True) -> Callable[[], Tensor]:
    ids = share(torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(2)))
    return lambda: model(ids[:, :-1], ids[:, 1:])


def fsdp(model: nn.Module, grid: Grid, reshard: bool) -> nn.Module:
    """Each linear of the stack, or each block of the GPT, and what is left in the root."""
    names = ("data", "z")
    mesh = init_device_mesh("cpu", (grid.gdata, grid.gz), mesh_dim_names=names)
    for part in model.blocks if isinstance(model, GPT) else model:
        fully_shard(part, mesh=mesh if grid.gdata > 1 else mesh["z"], reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh if grid.gdata > 1 else mesh["z"], reshard_after_forward=reshard)


def sharded(build: Any, loss: Any, grid: Grid, reshard: bool, bias: bool, **how: Any) -> tuple[Any, Any]:
    """Losses and bytes of ours and of FSDP2."""
    mesh = Mesh(grid)
    theirs = fsdp(build(bias), grid, reshard)
    plan = gpt_plan(CONFIG.heads) if build is gpt else {}
    ours = axonn_tp.parallelize(build(bias), mesh, plan, Options(reshard_after_forward=reshard, bucket_bytes=0))
    return (
        train(ours, loss(ours, mesh.shard_batch, **how), lambda: axonn_tp.sync_gradients(ours.parameters(), mesh)),
        train(theirs, loss(theirs, mesh.shard_batch, **how)),
    )


def every_sharded() -> dict[tuple, Any]:
    found: dict[tuple, Any] = {}
    for name, grid in GRIDS.items():
        for reshard in (True, False):
            found[name, "stack", reshard] = sharded(stack, stack_loss, grid, reshard, bias=False)
            found[name, "input", reshard] = sharded(stack, stack_loss, grid, reshard, bias=False, wants_input=False)
            found[name, "bias", reshard] = sharded(stack, stack_loss, grid, reshard, bias=True)
            found[name, "gpt", reshard] = sharded(gpt, gpt_loss, grid, reshard, bias=True)
    return found


@pytest.fixture(scope="module", params=[thorough("fsdp")])
def beside_fsdp() -> list[dict[tuple, Any]]:
    return run_ranks(every_sharded, RANKS)


def test_same_losses_as_fsdp_and_hsdp(beside_fsdp: list) -> None:
    for found in beside_fsdp:
        for case, ((ours, _), (theirs, _)) in found.items():
            assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < TOLERANCE, case


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("name", GRIDS)
def test_weights_cost_what_they_cost_there(beside_fsdp: list, name: str, reshard: bool) -> None:
    """One weight a module: calls and bytes by kind; but we sum over data in one call, where HSDP has one a module."""
    for found in beside_fsdp:
        (_, ours), (_, theirs) = found[name, "stack", reshard]
        assert {op: sent for op, (_, sent) in ours.items()} == {op: sent for op, (_, sent) in theirs.items()}
        gathers = 6 if reshard else 3
        assert ours["all_gather"][0] == theirs["all_gather"][0] == gathers
        assert ours["reduce_scatter"][0] == theirs["reduce_scatter"][0] == 3
        if name == "HSDP":
            assert (ours["all_reduce"][0], theirs["all_reduce"][0]) == (1, 3)


@pytest.mark.parametrize("name", GRIDS)
def test_a_first_layer_is_not_gathered_again(beside_fsdp: list, name: str) -> None:
    """FSDP2 gathers every module for its backward; a layer whose input wants no gradient does not need its weight."""
    for found in beside_fsdp:
        (_, ours), (_, theirs) = found[name, "input", True]
        assert (ours["all_gather"][0], theirs["all_gather"][0]) == (5, 6)
        assert ours["reduce_scatter"] == theirs["reduce_scatter"]


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("what", ["bias", "gpt"])
def test_whole_models_cost_what_they_cost_there(beside_fsdp: list, name: str, what: str) -> None:
    """Small parameters lie whole on every rank here and their gradients are all-reduced: as many bytes as FSDP2 gathers and scatters.

    But not where it gathers them twice.
    """
    for found in beside_fsdp:
        (_, ours), (_, theirs) = found[name, what, False]
        assert total(ours) == total(theirs)
        (_, ours), (_, theirs) = found[name, what, True]
        assert total(ours) < total(theirs)


class MLP(nn.Module):
    """Two linears, on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.tanh(self.fc1(x)))


def columns_and_rows(layout: str) -> tuple[Any, Any]:
    mesh, tensor = Mesh.create(gx=4), init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(1)
    serial = nn.Sequential(MLP(), MLP()).double()
    ours, theirs = copy.deepcopy(serial), copy.deepcopy(serial)
    axonn_tp.parallelize(
        ours, mesh, {"*.fc1": LayerPlan("normal"), "*.fc2": LayerPlan("transposed")}, Options(layout=layout)
    )
    leave_to_host(ours)
    for block in theirs:
        parallelize_module(block, tensor, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    share = mesh.shard_batch
    return (
        train(ours, stack_loss(ours, share), lambda: axonn_tp.sync_gradients(ours.parameters(), mesh)),
        train(theirs, stack_loss(theirs, share)),
    )


def both_layouts() -> list[tuple[Any, Any]]:
    return [columns_and_rows(layout) for layout in ("replicated", "scattered")]


def test_only_x_is_column_and_row_parallelism() -> None:
    for found in run_ranks(both_layouts, RANKS):
        for (ours, sent), (theirs, sent_there) in found:
            assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < TOLERANCE
            # Each pair: the output in forward, the input's gradient in backward.
            assert sent == sent_there == {"all_reduce": (4, 4 * Fraction(2 * 8 * 8 * 8 * 3, 4))}


class Operators(TorchDispatchMode):
    """Every operator that runs, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def operators(model: nn.Module, *inputs: Tensor) -> list[str]:
    with Operators() as run:
        model(*inputs).sum().backward()
    return run.seen


class Convolutions(nn.Module):
    """With padding, stride and upward, a group norm, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 8, 3, 2, 1), nn.ConvTranspose2d(8, 4, 2, 2)
        self.norm, self.drop = nn.GroupNorm(2, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.drop(torch.relu(self.norm(self.down(x)))))


def alone() -> dict[str, tuple[list[str], list[str]]]:
    mesh, found = Mesh.create(), {}
    everything = {name: True for name in ("overlap_all_reduce", "overlap_reduce_scatter", "overlap_all_gather")}
    ids = torch.randint(32, (2, 8))
    images = torch.randn(2, 4, 6, 6)
    pair = {"down": LayerPlan("normal"), "norm": LayerPlan("group_norm"), "up": LayerPlan("transposed")}
    for name, options in {
        "papers": Options(layout="replicated"),
        "default": Options(),
        "everything": Options(reshard_after_forward=True, gradient_dtype="float32", **everything),
    }.items():
        for model, plan, inputs in (
            (GPT(CONFIG), gpt_plan(CONFIG.heads), (ids, ids)),
            (GPT(CONFIG), {}, (ids, ids)),
            (GPT(GPTConfig(32, 8, 1, 4, 16, tied=True)), gpt_plan(CONFIG.heads), (ids, ids)),
            (Convolutions(), pair, (images,)),
        ):
            parallel = axonn_tp.parallelize(copy.deepcopy(model), mesh, plan, options)
            found[f"{name} {len(found)}"] = operators(model, *inputs), operators(parallel, *inputs)
    return found


def test_degree_1_adds_no_operation() -> None:
    for case, (serial, parallel) in run_ranks(alone, 1)[0].items():
        assert parallel == serial, (case, Counter(parallel) - Counter(serial), Counter(serial) - Counter(parallel))
