"""All systems at once, and checkpoints that go on elsewhere: on another grid, other stages, other experts, pruned or dense."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.compose.training import Case, readers_of, ready, serial_run, start, train
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks
from tests.matrix import chosen, names

CLOSE, STEPS, MIDDLE = 1e-10, 4, 2
ALL: dict[str, Any] = {
    "ted": {},
    "samo": {"sparsity": 0.9},
    "offload_optimizer": {"bucket_size": 1024},
    "pccl": {"tune": False},
}
SAMO: dict[str, Any] = {"samo": {"sparsity": 0.7, "start_step": 1}}


def grid(**sizes: int) -> dict[str, Any]:
    return {"tensor_parallel": {"plan": "auto", **sizes}}


FIRST = Case({**grid(gx=2), **ALL}, 1, experts=2, stages=2, tied=True, steps=STEPS)
# Name: saved by, and gone on with; as many ranks read different data in both.
MOVES = {
    "other stages": (
        Case(grid(gx=2) | SAMO, 1, stages=2, tied=True),
        Case({**SAMO, "offload_optimizer": {"bucket_size": 1024}}, 0, stages=4, tied=True),
    ),
    "other experts": (
        Case({**grid(gx=2), "ted": {}, **SAMO}, 2, experts=2),
        Case({**grid(gy=2), "ted": {}, **SAMO}, 1, experts=1),
    ),
    "experts with states of our own": (
        Case({"ted": {"tensor": 2}, "offload_optimizer": {}}, 1, experts=2),
        Case({"ted": {"tensor": 2}}, 2, experts=1),
    ),
    "states of DeepSpeed to ours": (Case(grid(gz=2), 2), Case({**grid(gz=4), "offload_optimizer": {}}, 1)),
    "grid to none": (Case({**grid(gz=4), **SAMO}, 1), Case(SAMO, 2)),
}


def go_on(first: Case, second: Case, folder: str, middle: int) -> Any:
    """Losses and norms with a checkpoint in the middle, and those of one process."""
    engine = start(first)
    losses, norms = train(engine, first, range(middle))
    engine.save_checkpoint(folder)
    engine.destroy()
    dist.barrier()
    engine = start(second)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None and engine.global_steps == middle
    more, more_norms = train(engine, second, range(middle, first.steps))
    readers = readers_of(second, engine)
    engine.destroy()
    dist.barrier()
    return losses + more, norms + more_norms, *serial_run(first, readers)


def check(found: Any) -> None:
    assert not isinstance(found, str), found
    losses, norms, wanted, wanted_norms = found
    assert losses == pytest.approx(wanted, rel=CLOSE) and norms == pytest.approx(wanted_norms, rel=CLOSE)


def together(folder: str) -> Any:
    ready(staged=True)
    second = replace(FIRST, block={**grid(gy=2), **ALL}, stage=0)
    return attempt(go_on, FIRST, second, folder, STEPS // 2)


def test_all_systems_together_and_resumed_on_another_grid(tmp_path: Path) -> None:
    """A GPT with experts, nine tenths pruned, in 2 stages × gx 2 × 2 data and expert ranks, by pccl, states in host memory."""
    check(run_ranks(together, 8, str(tmp_path))[0])


EVERY_RUN = {"other stages", "other experts", "states of DeepSpeed to ours"}


def longer(*cases: Case) -> list[Case]:
    """As many steps behind the middle as before it."""
    return [replace(case, steps=2 * MIDDLE) for case in cases]


def moves(folder: str, pairs: dict[str, tuple[Case, Case]]) -> dict[str, Any]:
    ready(staged=True)
    return {name: attempt(go_on, *longer(*pair), f"{folder}/{name}", MIDDLE) for name, pair in pairs.items()}


@pytest.fixture(scope="module")
def moved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(moves, 4, str(tmp_path_factory.mktemp("moves")), chosen(request, MOVES))[0]


@pytest.mark.parametrize("name", names(MOVES, EVERY_RUN))
def test_moves(moved: dict[str, Any], name: str) -> None:
    check(moved[name])


def pruned_to_dense(folder: str) -> tuple[list[float], list[float]]:
    """Losses of two steps after a pruned checkpoint was read by a dense run, and by one that goes on pruned."""
    ready(staged=False)
    pruned, dense = longer(
        Case({**grid(gx=2), "samo": {"sparsity": 0.7}}, 1), Case({**grid(gz=2), "offload_optimizer": {}}, 2)
    )
    engine = start(pruned)
    train(engine, pruned, range(MIDDLE))
    engine.save_checkpoint(folder)
    engine.destroy()
    found = []
    for case in (pruned, dense):
        engine = start(case)
        engine.load_checkpoint(folder)
        found.append(train(engine, case, range(MIDDLE, case.steps))[0])
        engine.destroy()
        dist.barrier()
    return found[0], found[1]


def test_a_pruned_checkpoint_is_read_dense(tmp_path: Path) -> None:
    pruned, dense = run_ranks(pruned_to_dense, 2, str(tmp_path))[0]
    assert pruned[0] == pytest.approx(dense[0], rel=CLOSE)
    assert pruned[1] != pytest.approx(dense[1], rel=1e-6)


def scaled(folder: str) -> tuple[list[float], list[float]]:
    """Norms of a run in fp16 whose loss scale grows with each step, and of one that goes on from its middle, read within a step."""
    ready(staged=False)
    growing = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}
    (case,) = longer(Case({**grid(gx=2), "offload_optimizer": {}}, 1, extra={"fp16": growing}))
    engine = start(case)
    train(engine, case, range(MIDDLE))
    engine.save_checkpoint(folder)
    found = [train(engine, case, range(MIDDLE, case.steps))[1]]
    engine.destroy()
    engine = start(case)
    ids = case.batches(readers_of(case, engine))[0][0][engine.mesh.rank("batch")]
    engine.backward(engine(ids[:, :-1], ids[:, 1:]))
    engine.step()
    engine.load_checkpoint(folder)
    found.append(train(engine, case, range(MIDDLE, case.steps))[1])
    engine.destroy()
    return found[0], found[1]


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    wanted, resumed = run_ranks(scaled, 2, str(tmp_path))[0]
    assert resumed == pytest.approx(wanted, rel=1e-6)
