"""Streams of tokens of different lengths in one model, on one mesh, at one time: exact, or refused in a sentence."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import axonn_tp
from axonn_tp import Grid, LayerPlan, Mesh, Options
from tests.axonn_tp.drawn import HIDDEN, PLAN, VOCABULARY, Streams
from tests.axonn_tp.test_grids import largest_error
from tests.distributed import meshes, run_ranks
from tests.matrix import thorough

TOLERANCE = 1e-10


def squared(outputs: tuple[Tensor, ...]) -> Tensor:
    return sum((output.square().mean() for output in outputs), torch.zeros((), dtype=torch.float64))


def gradient(parameter: nn.Parameter) -> Tensor:
    """Zeros where a layer is not used."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def plan_for(model: nn.Module) -> dict[str, LayerPlan]:
    """The patterns that match a layer."""
    names = [name for name, _ in model.named_modules() if name]
    return {pattern: layer for pattern, layer in PLAN.items() if any(fnmatchcase(name, pattern) for name in names)}


def batches(draw: random.Random) -> list[tuple[Tensor, Tensor]]:
    lengths = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(3)]
    return [tuple(torch.randint(VOCABULARY, (4, length)) for length in pair) for pair in lengths]  # type: ignore[misc]


def drawn(seeds: range) -> dict[str, float]:
    """Largest error of two passes' gradients, and of outputs, with a third pass without gradients before each backward."""
    found = {}
    world = dist.get_world_size()
    grids = [grid for grid in axonn_tp.factorisations(world) if grid.gdata == 1 and grid.gx * grid.gy > 1]
    for mesh in meshes(grids):
        for seed in seeds:
            draw = random.Random(seed)
            torch.manual_seed(seed)
            serial: Any = Streams(seed).double()
            layout = draw.choice(("scattered", "scattered", "replicated"))
            options = Options(
                layout=layout, reshard_after_forward=draw.random() < 0.5, regather_inputs=draw.random() < 0.5
            )
            parallel: Any = axonn_tp.parallelize(copy.deepcopy(serial), mesh, plan_for(serial), options)
            first, second, other = batches(draw)
            for model in (serial, parallel):
                for module in model.modules():
                    if hasattr(module, "p"):
                        module.p = 0.0
            expected = [serial(*batch) for batch in (first, second)]
            (squared(expected[0]) + squared(expected[1])).backward()
            got = [parallel(*(mesh.shard_batch(ids) for ids in batch)) for batch in (first, second)]
            with torch.no_grad():
                wanted, mine = (
                    model(*ids) for model, ids in ((serial, other), (parallel, [mesh.shard_batch(i) for i in other]))
                )
            (squared(got[0]) + squared(got[1])).backward()
            axonn_tp.sync_gradients(parallel.parameters(), mesh)
            # Some layers of some models are not used.
            error = largest_error(serial, parallel, mesh, gradient)
            for one, share in zip((*expected[0], *expected[1], *wanted), (*got[0], *got[1], *mine), strict=True):
                rows = one.chunk(mesh.grid.batch)[mesh.rank("batch")]
                error = max(error, (rows - share).abs().max().item() if rows.shape == share.shape else float("inf"))
            found[f"{mesh.grid} seed {seed}"] = error
    return found


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [
        (2, range(3)),
        (3, range(10, 11)),
        thorough(2, range(3, 10)),
        thorough(3, range(11, 16)),
        thorough(4, range(16, 19)),
    ],
)
def test_drawn_models_equal_serial(ranks: int, seeds: range) -> None:
    torch.manual_seed(0)
    for found in run_ranks(drawn, ranks, seeds):
        assert not {case: error for case, error in found.items() if not error < TOLERANCE}


def dropped(seeds: range, grids: list[Grid]) -> list[list[float]]:
    """Outputs of models with dropout, by rank of the x-y plane; once more where their blocks are recomputed."""
    found = []
    for mesh in meshes(grids):
        for seed in seeds:
            torch.manual_seed(seed)
            serial = Streams(seed).double()
            model: Any = axonn_tp.parallelize(serial, mesh, plan_for(serial))
            batch = batches(random.Random(seed))[0]
            sums = []
            for again in (None, True, False):
                for block in (*model.encoder, *model.decoder):
                    block.again = again
                model.zero_grad()
                torch.manual_seed(seed)
                loss = squared(model(*batch))
                loss.backward()
                slope = model.head.bias.grad.sum() + sum(
                    p.grad.square().sum() for p in model.encoder.parameters() if p.grad is not None
                )
                sums += [loss.item(), slope.item()]
            found.append(sums)
    return found


@pytest.mark.parametrize(
    ("seeds", "grids"), [(range(2), [Grid(2, 2)]), thorough(range(4), [Grid(2, 2), Grid(4)])], ids=["some", "all"]
)
def test_dropout_is_the_same_on_replicas_and_when_recomputed(seeds: range, grids: list[Grid]) -> None:
    ranks = run_ranks(dropped, 4, seeds, grids)
    for case in zip(*ranks, strict=True):
        for sums in case:
            assert sums[::2] == pytest.approx(case[0][:1] * 3, abs=1e-12)
            assert sums[1::2] == pytest.approx(sums[1:2] * 3, abs=1e-9)


class Branching(nn.Module):
    """A whole activation is dropped while a share waits for its partner, and a draw decides about a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(12, 12), nn.Linear(12, 12), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        x = F.dropout(self.drop(x), 0.5, self.training)
        if torch.rand(()) < 0.5:
            x = -x
        return x + self.down(inner)


def branches() -> list[bytes]:
    mesh = Mesh.create(2, 2)
    torch.manual_seed(1)
    model = axonn_tp.parallelize(Branching(), mesh, {"up": "normal", "down": "transposed"})
    return [model(torch.ones(3, 12)).detach().numpy().tobytes() for _ in range(4)]


def test_what_is_whole_is_dropped_alike_on_all_ranks() -> None:
    assert len({tuple(outputs) for outputs in run_ranks(branches, 4)}) == 1


class Code(nn.Module):
    """A stream, code on it, and a layer."""

    def __init__(self, code: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code
        self.table, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        x = self.norm(self.code(self.table(a), self.table(b)))
        x = self.down(self.up(x))
        return self.head(self.norm(x / x.norm(dim=-1, keepdim=True)))


CODE_PLAN = {"table": "embedding", "norm": "norm", "up": "normal", "down": "transposed", "head": "head"}


@torch.jit.script
def compiled(x: Tensor) -> Tensor:
    return x * 2


REFUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an activation of 7 tokens meets one of 8": lambda x, y: x + y,
    "an activation of 7 tokens meets one of 8, and": lambda x, y: torch.cat([x, y], 1),
    "getitem looked across": lambda x, y: x[:, -1],
    "getitem looked across them": lambda x, y: x[..., :1, :],
    "cat looked across": lambda x, y: torch.cat([x, x], 1),
    "mean looked across": lambda x, y: x.mean(1, keepdim=True) + x,
    "flip looked across": lambda x, y: x.flip(1),
    "softmax looked across": lambda x, y: F.softmax(x, dim=-2),
    "lstm looked across": lambda x, y: nn.LSTM(HIDDEN, HIDDEN, batch_first=True).double()(x)[0],
    "conv1d looked across": lambda x, y: F.conv1d(x.mT, x.new_ones(HIDDEN, 1, 3), padding=1, groups=HIDDEN).mT,
    "max_pool1d looked across": lambda x, y: F.max_pool1d(x.mT, 3, 1, 1).mT,
    "batch_norm looked across": lambda x, y: F.batch_norm(x.mT, None, None, training=True).mT,
    "linalg_vector_norm looked across": lambda x, y: x / torch.linalg.vector_norm(x, dim=1, keepdim=True),
    "tril looked across": lambda x, y: x.tril(),
    "matmul looked across": lambda x, y: (x @ x.transpose(-1, -2)) @ x,
    "code moved or cut": lambda x, y: x.transpose(0, 1),
    "code moved or cut them": lambda x, y: x.movedim(0, 2).movedim(2, 1),
    "does not tell of how many tokens": lambda x, y: compiled(x),
    "does not tell of how many tokens it": lambda x, y: torch.from_numpy(x.detach().numpy()),
}
TAKEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "transposed and back": lambda x, y: F.relu(x.transpose(1, 2)).transpose(2, 1),
    "permuted and back": lambda x, y: x.permute(1, 0, 2).permute(1, 0, 2),
    "one sequence": lambda x, y: x[1:] * 2,
    "flattened": lambda x, y: x.flatten(0, 1).tanh().view(x.shape),
    "a dim more": lambda x, y: x[:, None].squeeze(1),
    "of features": lambda x, y: torch.cat([part.relu() for part in x.chunk(2, -1)], -1),
    "cast": lambda x, y: x.float().double().detach().clone().contiguous().to(x),
    "pickled": lambda x, y: pickle.loads(pickle.dumps(x.detach())),
    "in place": lambda x, y: F.dropout(x.clone().mul_(2).add_(x), 0.0),
    "in the same place": lambda x, y: F.hardtanh(F.elu(x.clone(), 0.5, inplace=True), -0.2, 0.3),
    "in memory that was not there": lambda x, y: torch.empty_like(x).copy_(x) + x.new_empty(x.shape).copy_(x),
    "by mask": lambda x, y: torch.where(x > 0, x, x.new_zeros(x.shape)),
    "a norm of nothing else": lambda x, y: x / x.norm(dim=-1, keepdim=True),
    "a norm of another": lambda x, y: x / torch.linalg.vector_norm(x, dim=-1).unsqueeze(-1),
    "functions of features": lambda x, y: F.pad(F.group_norm(x.flatten(0, 1), 2), (1, 0))[:, 1:].view_as(x).sort(-1)[0],
    "a norm by hand": lambda x, y: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1),
}


def code() -> tuple[dict[str, str], dict[str, float]]:
    mesh, refused, taken = Mesh.create(4), {}, {}
    ids = [torch.randint(VOCABULARY, (2, length)) for length in (7, 8)]
    for name, function in {**REFUSED, **TAKEN}.items():
        torch.manual_seed(1)
        serial = Code(function).double()
        model = axonn_tp.parallelize(copy.deepcopy(serial), mesh, CODE_PLAN)
        try:
            for other in (serial, model) if name in TAKEN else (model,):
                other(*ids).square().mean().backward()
            axonn_tp.sync_gradients(model.parameters(), mesh)
            errors = [
                largest_error(serial, model, mesh, gradient),
                (model(*ids) - serial(*ids)).abs().max().item(),
            ]
            taken[name] = sum(errors)
        except ValueError as error:
            refused[name] = str(error)
    return refused, taken


def test_code_that_looks_across_tokens_is_refused() -> None:
    torch.manual_seed(0)
    for refused, taken in run_ranks(code, 4):
        assert refused.keys() == REFUSED.keys(), refused.keys() ^ REFUSED.keys()
        for words, message in refused.items():
            assert words in message and '"whole_tokens": true' in message and "\n" not in message
        assert taken.keys() == TAKEN.keys()
        assert not {name: error for name, error in taken.items() if not error < TOLERANCE}


def whole_input() -> str:
    mesh = Mesh.create(2)
    model = Code(lambda x, y: x)
    axonn_tp.parallelize(model, mesh, CODE_PLAN)
    with pytest.raises(ValueError) as refused:
        model.head(torch.randn(2, 4, HIDDEN))
    return str(refused.value)


def test_an_input_that_is_no_share_is_refused() -> None:
    assert all("does not tell of how many tokens" in message for message in run_ranks(whole_input, 2))


def frozen() -> Any:
    mesh = Mesh.create(2)
    before = dict(vars(mesh))
    model = axonn_tp.parallelize(Code(lambda x, y: x), mesh, CODE_PLAN)
    model(*(torch.randint(VOCABULARY, (2, 5)) for _ in range(2))).sum().backward()
    for name in (*before, "split_over"):
        with pytest.raises(AttributeError):
            setattr(mesh, name, None)
    return all(value is before[name] for name, value in vars(mesh).items()) and vars(mesh).keys() == before.keys()


def test_a_mesh_does_not_change() -> None:
    assert all(run_ranks(frozen, 2))


def through_the_compiler() -> list[float]:
    mesh = Mesh.create(2)
    torch.manual_seed(1)
    serial = Code(lambda x, y: torch.relu(x) + F.dropout(x, 0.0)).double()
    model = axonn_tp.parallelize(copy.deepcopy(serial), mesh, CODE_PLAN)
    faster = torch.compile(model, backend="eager")
    errors = []
    for length in (7, 8):
        ids = torch.randint(VOCABULARY, (2, length))
        for other in (serial, faster):
            other.zero_grad()
            other(ids, ids).square().mean().backward()
        axonn_tp.sync_gradients(model.parameters(), mesh)
        errors.append((faster(ids, ids) - serial(ids, ids)).abs().max().item())
        errors.append(largest_error(serial, model, mesh, lambda p: p.grad))
    return errors


def test_torch_compile_leaves_activations_as_they_are() -> None:
    torch.manual_seed(0)
    for errors in run_ranks(through_the_compiler, 2):
        assert max(errors) < TOLERANCE
