"""Replicas are compared all run long, in every call of the model, and what differs is named."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from axonn_plugins.hosts.common import digests
from tests.deepspeed.scripts import one_sentence
from tests.deepspeed.training import Case, attempt, start
from tests.distributed import run_ranks
from tests.matrix import asked, names, thorough

GRIDS = {"gx2gz2": (2, 1, 2), "gx2gy2": (2, 2, 1), "gy2gdata2": (1, 2, 1), "gz2gdata2": (1, 1, 2)}
ON = ("gx2gy2", "gz2gdata2")
"""Of every run: replicas along x and y, and along z and data."""
EVERY, STEPS = 4, 12


class Net(nn.Module):
    """A dropout that no module holds, so that all ranks of x and y must draw the same."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(16, 12), nn.LayerNorm(12), nn.Linear(12, 8)

    def forward(self, x: Tensor, y: Tensor | None = None, *, scale: float = 1.0, more: Any = None) -> Tensor:
        hidden = F.dropout(self.norm(torch.tanh(self.fc1(x))), 0.5, self.training)
        out = self.fc2(hidden) * scale
        return out if y is None else F.mse_loss(out, y)


def begin(grid: str, dtype: str = "fp32", build: type[nn.Module] = Net, plan: Any = "auto") -> Any:
    gx, gy, gz = GRIDS[grid]
    block = {
        "tensor_parallel": {
            "gx": gx,
            "gy": gy,
            "gz": gz,
            "check_every": EVERY,
            "plan": plan,
            "overlap_all_gather": plan == "auto",
        }
    }
    case = Case(build, lambda: (), GRIDS[grid], dtype=dtype, extra={"axonn": block, "gradient_accumulation_steps": 1})
    torch.manual_seed(7)
    return start(case)


def odd(engine: Any) -> bool:
    """One rank, the last: it is a replica of others on every grid."""
    return dist.get_rank() == dist.get_world_size() - 1


def train(
    grid: str, disturb: Callable[[Any, int], None], dtype: str = "fp32", labels: float = 1.0, **model: Any
) -> dict[str, Any]:
    """Error that ended the run and its step, or the parameters that replicas hold at its end."""
    engine = begin(grid, dtype, **model)
    data = torch.Generator().manual_seed(engine.mesh.rank("batch"))
    kind = next(engine.module.parameters()).dtype
    step = -1
    try:
        for step in range(STEPS):
            x, y = torch.randn(4, 16, generator=data).to(kind), torch.randn(4, 8, generator=data).to(kind)
            disturb(engine, step)
            out = engine(x)
            loss = F.mse_loss(out, y * (labels if step == 8 and odd(engine) else 1.0))
            engine.backward(loss)
            engine.step()
        norms = [engine.module.norm.weight.tolist(), engine.module.fc2.bias.tolist()]
        return {"norms": norms, "at": engine.mesh.coordinates}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "step": step}
    finally:
        engine.destroy()


def nothing(engine: Any, step: int) -> None:
    pass


def draw(engine: Any, step: int) -> None:
    if step == 5 and odd(engine):
        torch.rand(3)
        random.random()
        np.random.rand()  # noqa: NPY002


def touch(engine: Any, step: int) -> None:
    if step == 5 and odd(engine):
        with torch.no_grad():
            engine.module.norm.weight[3] *= 1 + 2e-2


class Skipping(Net):
    """Ranks of z call one of two layers alike, as experts that have tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.other = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 12)]), False

    def forward(self, x: Tensor, y: Tensor | None = None, *, scale: float = 1.0, more: Any = None) -> Tensor:
        return self.fc2(self.experts[int(self.other)](self.fc1(x)))


def skip(engine: Any, step: int) -> None:
    engine.module.other = step == 5 and engine.mesh.rank("z") == 1


def skipped(grid: str) -> dict[str, Any]:
    """A plan of the user's own splits layers that are called for some inputs only."""
    return train(grid, skip, build=Skipping, plan={"experts.*": "self_contained"})


class Several(nn.Module):
    """Two outputs; a loss may be of one of them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.more = nn.Linear(16, 12), nn.Linear(12, 8), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.fc1(x))
        return self.fc2(hidden), self.more(hidden)


def of_some(model: Any, reader: int, step: int, odd_labels: bool = False) -> Tensor:
    """The loss of a reader's samples, of which the first's alone have to do with both outputs."""
    data = torch.Generator().manual_seed(10 * step + reader)
    x, y = (torch.randn(4, size, generator=data, dtype=torch.float64) for size in (16, 8))
    first, second = model(x)
    loss = F.mse_loss(first, y)
    return loss if reader else loss + F.mse_loss(second, y * (1.5 if odd_labels else 1.0))


def outputs_of_some(grid: str, wrong: bool) -> dict[str, Any]:
    """Error that ended the run and its step, or how far its weights are from those of one process."""
    engine = begin(grid, "fp64", build=Several)
    reader, single, step = engine.mesh.rank("readers"), copy_of_serial(), -1
    optimizer = torch.optim.AdamW(single.parameters(), lr=1e-2, weight_decay=0.1)
    try:
        for step in range(4):
            engine.backward(of_some(engine, reader, step, wrong and step == 1 and dist.get_rank() == 1))
            engine.step()
            (sum(of_some(single, each, step) for each in range(2)) / 2).backward()  # type: ignore[union-attr]
            nn.utils.clip_grad_norm_(single.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
        there = engine.module.state_dict()
        return {"apart": max((there[name] - p).abs().max().item() for name, p in single.state_dict().items())}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "step": step}
    finally:
        engine.destroy()


def copy_of_serial() -> nn.Module:
    return Case(Several, lambda: (), dtype="fp64").model()


def of_outputs() -> list[dict[str, Any]]:
    return [outputs_of_some("gy2gdata2", wrong) for wrong in (False, True)]


def test_a_loss_of_some_outputs_on_some_ranks() -> None:
    """Gradients of an output come on ranks that read some of the data alone; of those that differ between replicas all ranks hear."""
    ranks = run_ranks(of_outputs, 4)
    for trained, refused in ranks:
        assert trained["apart"] <= 1e-10, trained
        assert refused["step"] == 1 and "ConfigError: the gradients of the model's outputs differs" in refused["error"]
    assert len({refused["error"] for _, refused in ranks}) == 1


def after_another() -> dict[str, Any]:
    """What is left of an engine when an earlier one of the same model is thrown away, which has ended before."""
    block = {"tensor_parallel": {"gx": 2, "gy": 1, "gz": 1, "plan": "auto"}}
    case = Case(Several, lambda: (), dtype="fp64", stage=1, extra={"axonn": block, "gradient_accumulation_steps": 1})
    earlier = start(case)
    model = earlier.module
    earlier.destroy()
    engine = start(case, model)
    earlier.destroy()  # as Python does when it goes
    weights = [safe_get_full_fp32_param(parameter) for parameter in model.parameters()]
    serial_ones = copy_of_serial().parameters()
    apart = [None if w is None else (w - s).abs().max().item() for w, s in zip(weights, serial_ones, strict=True)]
    engine.eval()
    try:
        engine(torch.full((4, 16), float(dist.get_rank()), dtype=torch.float64))
        said = "no error"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    engine.destroy()
    return {"apart": apart, "said": said, "left": type(model) is Several}


def test_an_engine_outlives_an_earlier_one_of_its_model() -> None:
    for found in run_ranks(after_another, 2):
        assert found["apart"] == [0.0] * 6, found
        assert found["said"].startswith("ConfigError: the model's argument x differs on rank 1 from that of rank 0")
        assert found["left"]


def calls(cases: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[int], Tensor]]], grid: str) -> dict[str, str]:
    """Errors of calls outside training."""
    engine, found = begin(grid), {}
    engine.eval()
    for name, (how, mine) in cases.items():
        try:
            with torch.no_grad():
                how(engine, mine(dist.get_rank()))
            found[name] = "no error"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    engine.destroy()
    assert type(engine.module) is Net
    return found


def ids(rank: int) -> Tensor:
    """Of the last rank two rows have changed places."""
    rows = torch.arange(64.0).view(4, 16)
    return rows[[0, 2, 1, 3]] if rank == 3 else rows


CALLS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "engine": (lambda engine, x: engine(x), "x"),
    "module": (lambda engine, x: engine.module(x), "x"),
    "forward": (lambda engine, x: engine.module.forward(x=x), "x"),
    "copy": (lambda engine, x: copy.deepcopy(engine.module)(x), "x"),
    "nested": (lambda engine, x: engine.module(torch.ones(2, 16), more={"ids": [1, x]}), "more.ids[1]"),
    "number": (lambda engine, x: engine.module(torch.ones(2, 16), scale=float(x[1, 0])), "scale"),
    "shape": (lambda engine, x: engine.module(x[: int(x[1, 0]) // 8]), "x"),
    "type": (lambda engine, x: engine.module(x.double() if x[1, 0] > 16 else x), "x"),
    "absent": (lambda engine, x: engine.module(*[torch.ones(2, 16)] * (2 if x[1, 0] > 16 else 1)), "y"),
}
RUNS: dict[str, tuple[Any, ...]] = {
    **{f"alike {grid}": (grid, nothing) for grid in GRIDS},
    **{f"draw {grid}": (grid, draw) for grid in GRIDS},
    **{f"touch {grid}": (grid, touch) for grid in GRIDS},
    "labels bf16": ("gx2gz2", nothing, "bf16", 2.0),
    "alike bf16": ("gx2gz2", nothing, "bf16"),
    "labels": ("gx2gz2", nothing, "fp32", 1.01),
}


def everything(names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {name: attempt(train, *RUNS[name]) for name in names}
    module = CALLS["module"][0]
    found |= calls(
        {name: (how, ids) for name, (how, _) in CALLS.items()} | {"same": (module, lambda rank: ids(0))}, "gx2gz2"
    )
    found["skipped"] = attempt(skipped, "gx2gz2")
    return found | calls({"data": (module, ids)}, "gy2gdata2")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    wanted = {f"{what} {grid}" for (grid,) in asked(request, "grid") for what in ("alike", "draw")}
    wanted |= {name for (name,) in asked(request, "name")} | {"alike bf16"}
    return run_ranks(everything, 4, [name for name in RUNS if name in wanted])


@pytest.mark.parametrize("grid", names(GRIDS, ON))
def test_a_draw_on_one_rank_changes_nothing(grid: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "error" not in rank[f"alike {grid}"], rank[f"alike {grid}"]
        norms = rank[f"draw {grid}"]["norms"]
        if grid != "gz2gdata2":  # where each rank draws for its own samples
            assert norms == rank[f"alike {grid}"]["norms"]
        assert norms == ranks[0][f"draw {grid}"]["norms"]


@pytest.mark.parametrize("name", names([f"touch {grid}" for grid in GRIDS], [f"touch {grid}" for grid in ON]))
def test_a_parameter_that_drifts_is_named(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank[name]
        assert found["step"] == 7, found
        sentence = found["error"]
        assert sentence.startswith("ConfigError: parameter norm.weight differs on rank"), sentence
        assert "from that of rank" in sentence and "after step 8" in sentence and one_sentence(sentence)
    assert len({rank[name]["error"] for rank in ranks}) == 1


def test_half_precision_alone_is_no_drift(ranks: list[dict[str, Any]]) -> None:
    assert all("norms" in rank["alike bf16"] for rank in ranks)


@pytest.mark.parametrize("name", ["labels", thorough("labels bf16")])
def test_labels_that_differ_late_are_refused(name: str, ranks: list[dict[str, Any]]) -> None:
    """At step 8, which is not looked at; at the end of step 12 the parameters are."""
    for rank in ranks:
        assert rank[name]["step"] == 11 and rank[name]["error"].startswith("ConfigError: parameter "), rank[name]


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_the_model_are_compared(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        argument = CALLS[name][1]
        said = f"ConfigError: the model's argument {argument} differs on rank 3 from that of rank 2"
        assert rank[name].startswith(said) and one_sentence(rank[name]), rank[name]
        assert rank["same"] == "no error"


def test_ranks_of_data_may_be_evaluated_apart(ranks: list[dict[str, Any]]) -> None:
    found = [rank["data"] for rank in ranks]
    assert found[:2] == ["no error"] * 2 and found[2] == found[3] and "differs on rank 3" in found[2]


def test_ranks_of_z_that_call_other_layers_are_named(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["skipped"]
        assert (
            found["step"] == 6 and "in step 6 or before, ranks 2, 3 called other layers than rank 0" in found["error"]
        )
        assert one_sentence(found["error"])


def test_digests_see_order_and_bits() -> None:
    torch.manual_seed(0)
    for kind in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64):
        values = torch.randint(0, 2, (70_000,)).to(kind)
        values[:4] = torch.tensor([0, 1, 1, 0]).to(kind)
        swapped = values.clone()
        swapped[:2] = values[:2].flip(0)
        apart = torch.cat([values[2**16 :], values[: 2**16]])
        found = {int(digests.digest(v)) for v in (values, swapped, apart, values[:-1], values.view(2, -1)[:, ::2])}
        assert len(found) == 5, kind
        assert digests.digest(values) == digests.digest(values.clone().view(100, -1))


def test_digests_of_sparse_tensors() -> None:
    """Values count, and their places; the model of a graph is given such ones."""
    dense, moved, other = torch.zeros(3, 6, 4, dtype=torch.float64)
    dense[1, 2], moved[1, 3], other[1, 2] = 1.0, 1.0, 1.5
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        one, *others = (each.to_sparse(layout=layout) for each in (dense, moved, other))
        assert len({int(digests.digest(each)) for each in (one, *others)}) == 3, layout
        assert digests.digest(one) == digests.digest(one.clone())
        assert digests.sketch(one).distance(digests.sketch(others[1])) > 0.1
    for layout in (torch.sparse_bsr, torch.sparse_bsc):
        blocks = [each.to_sparse(layout=layout, blocksize=(2, 2)) for each in (dense, other)]
        assert digests.digest(blocks[0]) != digests.digest(blocks[1])


def test_sketches_measure_distances() -> None:
    torch.manual_seed(0)
    a, step = torch.randn(100_000), torch.randn(100_000)
    one = digests.sketch(a)
    for distance in (1e-1, 1e-4):
        found = one.distance(digests.sketch(a + distance * step))
        assert distance / 4 < found < distance * 4
    broken = torch.where(torch.arange(100_000) == 7, torch.nan, a)
    assert one.distance(digests.sketch(broken)) == float("inf")
    assert (
        digests.sketch(broken).distance(digests.sketch(broken + step)) == one.distance(digests.sketch(a.clone())) == 0
    )
