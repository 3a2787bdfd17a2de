"""3D PMM equals the serial model on every factorisation of 1, 2, 4 and 8 ranks, in float64."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import axonn_tp
from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_tp import Grid, LayerPlan, Mesh, Options, factorisations, layout_of
from tests.distributed import meshes, run_ranks
from tests.matrix import thorough

TOLERANCE = 1e-10
WORLDS = (1, 2, 4, 8)


def gpt_plan(heads: int) -> dict[str, LayerPlan]:
    return {
        "tokens": LayerPlan("embedding"),
        "positions": LayerPlan("embedding"),
        "*.ln?": LayerPlan("norm"),
        "norm": LayerPlan("norm"),
        "*.qkv": LayerPlan("normal", parts=3, heads=heads),
        "*.proj": LayerPlan("transposed"),
        "*.fc1": LayerPlan("normal"),
        "*.fc2": LayerPlan("transposed"),
        "head": LayerPlan("head"),
        "loss": LayerPlan("loss"),
    }


def whole(parameter: torch.Tensor, value: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The serial tensor from every rank's share of it."""
    shares = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, value.contiguous())
    return layout_of(parameter).assemble(shares, mesh.grid)


def largest_error(
    serial: nn.Module, parallel: nn.Module, mesh: Mesh, of: Callable[[nn.Parameter], torch.Tensor | None]
) -> float:
    """Of what `of` reads from the parameters; all ranks' shares are gathered in one call."""
    expected = {name: of(parameter) for name, parameter in serial.named_parameters()}
    ours = dict(parallel.named_parameters())
    got = {name: value for name in expected if (value := of(ours[name])) is not None}
    assert got.keys() == {name for name, value in expected.items() if value is not None}
    if not got:
        return 0.0
    flat = torch.cat([value.reshape(-1) for value in got.values()])
    shares = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, flat)
    sizes, error = [value.numel() for value in got.values()], 0.0
    for (name, value), pieces in zip(
        got.items(), zip(*(share.split(sizes) for share in shares), strict=True), strict=True
    ):
        assembled = layout_of(ours[name]).assemble([piece.view_as(value) for piece in pieces], mesh.grid)
        assert assembled.shape == expected[name].shape, name
        error = max(error, (assembled - expected[name]).abs().max().item())
    return error


@dataclass
class Step:
    """A step of the serial model: the model before it and after it, its gradients on the latter."""

    before: nn.Module
    after: nn.Module
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    norm: torch.Tensor


def serial_step(build: Callable[[], nn.Module], run: Callable, batch: tuple) -> Step:
    """One AdamW step, clipped."""
    torch.manual_seed(7)
    before = build().double()
    after = copy.deepcopy(before)
    optimizer = torch.optim.AdamW(after.parameters(), lr=0.1, weight_decay=0.1)
    loss = run(after, *batch)
    loss.backward()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in after.named_parameters()}
    norm = nn.utils.clip_grad_norm_(after.parameters(), 0.5)
    optimizer.step()
    return Step(before, after, loss.detach(), gradients, norm)


def train_one_step(
    build: Callable[[], nn.Module],
    plan: dict[str, LayerPlan],
    run: Callable,
    batch: tuple,
    mesh: Mesh,
    options: Options | None = None,
    forwards: int = 1,
    expected: Step | None = None,
) -> dict[str, float]:
    """Errors of output loss, gradients, norm and the weights after one AdamW step against the serial model.

    The first `forwards` − 1 passes are only for the order of gathers to be learned; where there are some, gradients are
    summed while backward runs. Ranks that train on many grids are given the `expected` step, taken once before they start.
    """
    expected = expected or serial_step(build, run, batch)
    parallel = axonn_tp.parallelize(copy.deepcopy(expected.before), mesh, plan, options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1, weight_decay=0.1)
    reducer = axonn_tp.GradientReducer(parallel.parameters(), mesh, bucket_bytes=3000) if forwards > 1 else None
    for _ in range(forwards):
        parallel.zero_grad()
        mine = run(parallel, *(mesh.shard_batch(tensor) for tensor in batch))
        mine.backward()
        if reducer is None:
            axonn_tp.sync_gradients(parallel.parameters(), mesh)
        else:
            reducer.finish()
    loss = mine.detach().clone()
    dist.all_reduce(loss, group=mesh.group("batch"))
    gradients = {id(p): expected.gradients[name] for name, p in expected.after.named_parameters()}
    errors = {
        "loss": (loss / mesh.grid.batch - expected.loss).abs().item(),
        "gradients": largest_error(expected.after, parallel, mesh, lambda p: gradients.get(id(p), p.grad)),
    }
    if reducer is None:  # both ways are there: torch's is a script's own
        norm = nn.utils.clip_grad_norm_(parallel.parameters(), 0.5)
    else:
        norm = axonn_tp.clip_grad_norm_(parallel.parameters(), mesh, 0.5)
    errors["norm"] = (norm - expected.norm).abs().item()
    optimizer.step()
    errors["weights"] = largest_error(expected.after, parallel, mesh, lambda p: p.data)
    return errors


EVERYTHING = Options(reshard_after_forward=True, cache_gathers=3, regather_inputs=True)
NOTHING = Options(layout="replicated", overlap_all_reduce=False, overlap_reduce_scatter=False, overlap_all_gather=False)


class CheckpointedGPT(GPT):
    """Its blocks are run again in backward, every other one by the reentrant checkpoint."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        for number, block in enumerate(self.blocks):
            again = partial(checkpoint, block.forward, use_reentrant=bool(number % 2))
            block.forward = again


def gpt_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids[:, :-1], ids[:, 1:])


def gpt_errors(ranks: int, config: GPTConfig, grids: list[Grid], options: Options, checkpointed: bool) -> list[dict]:
    """By rank and grid."""
    torch.manual_seed(3)
    ids = torch.randint(config.vocabulary, (8, config.context + 1))
    build = partial(CheckpointedGPT if checkpointed else GPT, config)
    return run_ranks(gpt_on_grids, ranks, build, ids, grids, options, serial_step(build, gpt_loss, (ids,)))


def gpt_on_grids(
    build: Callable[[], GPT], ids: torch.Tensor, grids: list[Grid], options: Options, expected: Step
) -> dict[str, dict[str, float]]:
    found = {}
    for mesh in meshes(grids):
        plan = gpt_plan(expected.before.config.heads)
        found[str(mesh.grid)] = train_one_step(build, plan, gpt_loss, (ids,), mesh, options, 2, expected)
    return found


@pytest.mark.parametrize(("ranks", "turns"), [(1, 1), (2, 2), (4, 2), *map(thorough, WORLDS[1:], (1, 1, 1))])
@pytest.mark.parametrize("tied", [False, True])
def test_gpt(ranks: int, turns: int, tied: bool) -> None:
    """Of 2 and 4 ranks' grids tied and untied have a half each in every run; of 8 ranks' those with everything on are."""
    config = GPTConfig(vocabulary=61, context=6, layers=2 - tied, heads=8, hidden=48, tied=tied)
    options = NOTHING if tied else Options()
    grids_of_run = list(factorisations(ranks))[tied % turns :: turns]
    for grids in gpt_errors(ranks, config, grids_of_run, options, False):
        for grid, errors in grids.items():
            assert max(errors.values()) < TOLERANCE, (grid, errors)


SOME, THREE_AXES, ALL_AXES = [Grid(2, 2, 2)], [Grid(2, 2, 2), Grid(1, 2, 4), Grid(2, 1, 2, 2)], [Grid(2, 2, 2, 2)]


@pytest.mark.parametrize(
    ("ranks", "grids", "checkpointed"),
    [
        (4, [Grid(1, 2, 2), Grid(2, 1, 1, 2)], False),
        (8, SOME, True),
        thorough(8, THREE_AXES, False),
        thorough(8, THREE_AXES, True),
        thorough(16, ALL_AXES, False),
        thorough(16, ALL_AXES, True),
    ],
)
def test_gpt_with_everything_on(ranks: int, grids: list[Grid], checkpointed: bool) -> None:
    config = GPTConfig(vocabulary=61, context=7, layers=2, heads=8, hidden=32, tied=True)
    for found in gpt_errors(ranks, config, grids, EVERYTHING, checkpointed):
        for grid, errors in found.items():
            assert max(errors.values()) < TOLERANCE, (grid, errors)


def attention_and_memory(grids: list[Grid]) -> dict[str, tuple[int, Counter[str]]]:
    """Heads that this rank attends with, and bytes that autograd keeps of one forward pass by module, without parameters."""
    config = GPTConfig(vocabulary=64, context=16, layers=2, heads=8, hidden=64)
    choices = {
        "replicated": Options(layout="replicated"),
        "scattered": Options(),
        "regathered": Options(regather_inputs=True),
    }
    found = {}
    for mesh in meshes(grids):
        grid = mesh.grid
        for how, options in choices.items():
            model = axonn_tp.parallelize(GPT(config), mesh, gpt_plan(config.heads), options)
            found[f"{grid} {how}"] = watched_forward(model, torch.randint(64, (4, 16)))
    return found


def watched_forward(model: nn.Module, ids: torch.Tensor) -> tuple[int, Counter[str]]:
    heads: list[int] = []
    attend = F.scaled_dot_product_attention

    def watched(q: torch.Tensor, *rest: torch.Tensor, **keywords: bool) -> torch.Tensor:
        heads.append(q.shape[1])
        return attend(q, *rest, **keywords)

    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, tuple[str, torch.Tensor]] = {}
    running: list[str] = [""]

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            # The tensor is held, so that no other gets its place.
            kept.setdefault(storage.data_ptr(), (running[-1], tensor))
        return tensor

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: running.append(name.rpartition(".")[2])

    for name, module in model.named_modules():
        module.register_forward_pre_hook(enter(name))
        module.register_forward_hook(lambda *_: running.pop() and None)
    with mock.patch.object(F, "scaled_dot_product_attention", watched):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(ids, ids)
    sizes: Counter[str] = Counter()
    for name, tensor in kept.values():
        sizes[name] += tensor.untyped_storage().nbytes()
    return heads[0], sizes


STREAM, INNER = ("ln1", "ln2", "qkv", "fc1", "norm", "head"), ("attention", "proj", "fc2", "0", "1")


def test_scattered_attends_and_keeps_less() -> None:
    grids = [Grid(2, 2, 1), Grid(4, 1, 1), Grid(1, 4, 1)]
    found = run_ranks(attention_and_memory, 4, grids)[0]
    for grid, largest in zip(grids, ((0.75, 0.51), (0.78, 0.56), (0.62, 0.33)), strict=True):
        replicated, scattered, regathered = (
            found[f"{grid} {how}"] for how in ("replicated", "scattered", "regathered")
        )
        assert (replicated[0], scattered[0]) == (8 // grid.gx, 8 // grid.gx // grid.gy)
        sizes = [kept.total() for _, kept in (replicated, scattered, regathered)]
        assert sizes[1] < largest[0] * sizes[0] and sizes[2] < largest[1] * sizes[0], (grid, sizes)
        for names, factor in ((STREAM, grid.gx), (INNER, grid.gy)):
            whole, share = (sum(kept[name] for name in names) for _, kept in (replicated, regathered))
            assert share * factor == whole, (grid, names)


class Collectives(TorchDispatchMode):
    """Names of the operators that communicate."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        namespace, name = function._schema.name.split("::")
        if "c10d" in namespace or namespace == "axonn":
            self.names.add(name)
        return function(*args, **(kwargs or {}))


def collectives_of_training(grid: Grid) -> set[str]:
    config, mesh = GPTConfig(vocabulary=64, context=16, layers=2, heads=4, hidden=32), Mesh(grid)
    model = axonn_tp.parallelize(GPT(config), mesh, gpt_plan(config.heads))
    ids = torch.randint(64, (2, 16))
    with Collectives() as seen:
        for _ in range(2):
            model(ids, ids).backward()
            axonn_tp.sync_gradients(model.parameters(), mesh)
    return seen.names


def test_no_collective_corrupts_gloos_heap() -> None:
    """Gloo's two threads free the name of a finished work twice where it has more than 15 characters, as coalesced ones do."""
    safe = {
        "all_gather_into_tensor_out",
        "reduce_scatter_tensor",
        "reduce_scatter_parts",
        "all_reduce",
        "all_reduce_",
        "wait_tensor",
    }
    for names in run_ranks(collectives_of_training, 4, Grid(2, 1, 2)):
        assert names <= safe
