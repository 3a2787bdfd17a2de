"""One random case: a model, a grid, options and data, drawn from a number, and its run beside the serial model."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import axonn_tp
from axonn_tp import Grid, Mesh, Options, factorisations
from tests.fuzz.models import Drawn, Model, draw

TOLERANCE = 1e-10
PLANS = ("auto", "auto", "auto with inputs", "pairs", "pairs", "stream", "none")


@dataclass(frozen=True)
class Case:
    """A case that a number draws; equal numbers draw equal cases.

    Attributes:
        number: of the case, with its seed.
        grid: the ranks.
        drawn: the model.
        plan: one of `PLANS`.
        options: of the run.
        lengths: of each stream, for each micro-batch of each step.
        samples: of each rank of z and data in a micro-batch.
    """

    number: tuple[int, int]
    grid: Grid
    drawn: Drawn
    plan: str
    options: Options
    lengths: tuple[tuple[tuple[int, ...], ...], ...]
    samples: int

    def __str__(self) -> str:
        grid = "x".join(str(getattr(self.grid, name)) for name in ("gx", "gy", "gz", "gdata"))
        return f"case {self.number[1]} of seed {self.number[0]}: {grid}, plan {self.plan}, {self.options}, lengths {self.lengths}\n{self.drawn}"


def case(seed: int, number: int, world: int) -> Case:
    """The case of a number on so many ranks."""
    random = Random(f"{seed}/{number}")
    grid = random.choice(list(factorisations(world)))
    drawn = draw(random)
    options = Options(
        layout=random.choice(("scattered", "scattered", "replicated")),
        overlap_all_reduce=random.random() < 0.7,
        overlap_reduce_scatter=random.random() < 0.7,
        overlap_all_gather=random.random() < 0.7,
        reshard_after_forward=random.choice([False, False, False, True, 0.5]),
        regather_inputs=random.random() < 0.3,
        cache_gathers=random.choice((0, 0, 1, "all", "1KiB")),
    )
    steps = tuple(
        tuple(tuple(random.randint(1, 9) for _ in range(drawn.streams)) for _ in range(random.choice((1, 1, 2))))
        for _ in range(2)
    )
    return Case((seed, number), grid, drawn, random.choice(PLANS), options, steps, random.randint(1, 2))


Batch = tuple[list[Tensor], list[Tensor]]


def batches(case: Case) -> list[list[Batch]]:
    """Inputs and labels of every micro-batch of every step, for all ranks together."""
    generator = torch.Generator().manual_seed(case.number[1])
    size = case.samples * case.grid.batch

    def make(lengths: tuple[int, ...]) -> Batch:
        inputs, labels = [], []
        for number, length in enumerate(lengths):
            tokens = torch.randint(case.drawn.vocabulary, (size, length), generator=generator)
            if case.drawn.floats[number]:
                tokens = torch.randn(size, length, case.drawn.hidden, generator=generator, dtype=torch.float64)
            inputs.append(tokens)
            labels.append(torch.randint(case.drawn.vocabulary, (size, length), generator=generator))
        return inputs, labels

    return [[make(lengths) for lengths in step] for step in case.lengths]


def train(model: Model, steps: list[list[Batch]], mesh: Mesh | None) -> list[Tensor]:
    """Two steps of SGD; the loss of each micro-batch, and one without gradients between forward and backward of the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []

    def own(batch: Batch) -> Batch:
        return batch if mesh is None else tuple([mesh.shard_batch(t) for t in part] for part in batch)  # type: ignore[return-value]

    for number, step in enumerate(steps):
        optimizer.zero_grad()
        for batch in step:
            loss = model(*own(batch))
            if number:
                with torch.no_grad():
                    losses.append(model(*own(steps[0][0])))
            (loss / len(step)).backward()
            losses.append(loss.detach())
        if mesh is not None:
            axonn_tp.sync_gradients(model.parameters(), mesh)
        optimizer.step()
    return losses


def make(case: Case) -> Model:
    """The serial model, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.number[1] + 1)
        model = Model(case.drawn).double()
    for table in model.tables:  # tables of torch's own size make the losses of deep models explode
        table.weight.data.mul_(0.3)
    return model


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def run(case: Case, mesh: Mesh) -> str:
    """Run a case; returns "equal", "refused: …" or "wrong: …". Every rank calls it."""
    steps, serial, model = batches(case), make(case), make(case)
    random = Random(case.number[1])
    plan: Any = None if case.plan == "none" else "auto"
    if case.plan in ("pairs", "stream"):
        plan = model.plan(random, case.plan == "stream")
    example = steps[0][0] if case.plan == "auto with inputs" else None
    try:
        with _silent():
            axonn_tp.parallelize(model, mesh, plan, case.options, example)
        found = torch.stack(train(model, steps, mesh))
    except ValueError as error:
        return f"refused: {error}"
    dist.all_reduce(found, group=mesh.group("grid"))
    found /= case.grid.world
    state = axonn_tp.full_state_dict(model, mesh)
    if dist.get_rank():
        return "equal"
    expected = torch.stack(train(serial, steps, None))
    worst, where = max(((found - expected).abs().max() / (1 + expected.abs().max())).item(), 0.0), "the loss"
    # Rounding goes with the largest gradient, also where a gradient is zero but for it, as that of a key's bias is.
    scale = 1 + max(p.grad.abs().max().item() for p in serial.parameters() if p.grad is not None)
    for name, value in serial.state_dict().items():
        error = ((state[name] - value).abs().max() / scale).item()
        if not error <= worst:
            worst, where = error, name
    return "equal" if worst <= TOLERANCE else f"wrong: {where} by {worst:.2g}"
