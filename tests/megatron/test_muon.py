"""Megatron's Muon on grids: weights are those of one rank's own, also from a checkpoint, by a double of emerging_optimizers."""

from __future__ import annotations

import queue
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("megatron.core.optimizer.muon", reason="this megatron-core has no Muon")

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import finalize_model_grads

from axonn_plugins.hosts.megatron import checkpoint, muon, process_groups
from axonn_plugins.hosts.megatron.originals import Originals
from axonn_plugins.hosts.megatron.settings import Settings
from axonn_tp import layout_of
from tests.axonn_tp.families import in_float64
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.megatron import muon_double, training
from tests.megatron.test_checkpoint import state, steps
from tests.megatron.test_layers import LLAMA
from tests.megatron.training import Case

MUON = {"optimizer": "muon", "lr": 1e-2, "clip_grad": 0.0}  # Megatron clips in float32
WHOLE = Case(steps=4, dtype=torch.float64, batch=4, optimizer=MUON)
CASES = {
    "llama": replace(WHOLE, config=LLAMA.config, model=LLAMA.model),
    "gpt": replace(
        WHOLE,
        config={"add_qkv_bias": False},
        optimizer={
            **MUON,
            "muon_split_qkv": False,
            "muon_use_nesterov": True,
            "muon_scale_mode": "unit_rms_norm",
            "muon_extra_scale_factor": 0.7,
            "muon_num_ns_steps": 3,
            "muon_momentum": 0.8,
            "muon_tp_mode": "duplicated",
        },
    ),
}
HALVES = replace(CASES["llama"], dtype=torch.bfloat16, ddp={"grad_reduce_in_fp32": True})
GRIDS = [Settings(2, 2), Settings(2, 1, 2), Settings(1, 2, 2, layout="replicated"), Settings(1, 1, 4), Settings(4)]
"""Of which the first three are in every run."""


def _trained(cases: dict[str, Case], halves: dict[str, Case]) -> dict[str, dict[str, Any]]:
    with in_float64():
        found = training.train_all(cases)
    return found | {name: _stepped(case) for name, case in halves.items()}


def _stepped(case: Case) -> dict[str, Any]:
    """Float32 weights behind a step by the same gradients on any grid, or how far they are from those of one rank."""
    found = {}
    with _begun(case) as (model, optimizer):
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            gradient = torch.randn(layout_of(parameter).serial_shape, generator=drawn)
            parameter.main_grad.copy_(_part(parameter, gradient, case))
        optimizer.step()
        for name, parameter in model.named_parameters():
            made = parameter.main_param.detach()
            if case.settings is None:
                found[name] = made.numpy().copy()
            else:
                found[name] = float((made - _part(parameter, torch.from_numpy(case.expected[name]), case)).abs().max())
    return found


def _part(parameter: torch.Tensor, whole: torch.Tensor, case: Case) -> torch.Tensor:
    if case.settings is None:
        return whole
    mesh = process_groups.mesh()
    return layout_of(parameter).shard(whole, mesh.grid, mesh.coordinates).view_as(parameter)


@pytest.mark.parametrize(("name", "steps"), [("llama", 2), *(thorough(name, 10) for name in CASES)])
def test_weights_are_those_of_one_rank(name: str, steps: int) -> None:
    case = replace(CASES[name], steps=steps)
    alone = run_ranks(_trained, 1, {name: case}, {"halves": HALVES})[0]
    stock, halves = alone[name], HALVES.on(GRIDS[1], expected=alone["halves"])
    cases = {str(grid): case.on(grid, expected=stock["weights"]) for grid in (GRIDS if steps > 2 else GRIDS[:3])}
    for rank in run_ranks(_trained, 4, cases, {"halves": halves}):
        # Muon then steps float32 copies of the shares.
        assert max(rank.pop("halves").values()) < 1e-6
        for grid, found in rank.items():
            both = zip(found["losses"], stock["losses"], strict=True)
            assert max(abs(f - w) / w for f, w in both) < 1e-6, grid  # told in float32
            assert max(found["weights"].values()) < 1e-9, grid


@contextmanager
def _begun(case: Case) -> Iterator[tuple[Any, Any]]:
    with training.parallel(case):
        model = training.build(case)
        optimizer = training._optimizer(case, model)
        model.module.config.finalize_model_grads_func = finalize_model_grads
        model.module.config.grad_scale_func = optimizer.scale_loss
        yield model, optimizer


ROUTES: dict[str, tuple[Settings | None, list[Settings | None]]] = {
    "grid": (Settings(2, 1, 2), [Settings(1, 2, 2), None, Settings(2, 2), Settings(2, 1, 2)]),
    "stock": (None, [Settings(1, 1, 4), Settings(1, 2)]),
}
"""From which settings to which, those in every run first; None is Megatron's own Muon on data-parallel ranks."""


def _resumed(folder: str, every: bool) -> dict[str, float]:
    """By route and place, the largest distance of weights from those of two steps at once."""
    training.on_cpu()
    muon_double.install()
    filesystem_async._results_queue = queue.Queue()  # as in test_checkpoint
    checkpoint.install()
    case, found = replace(CASES["llama"], steps=2), {}
    with in_float64():
        with _begun(case.on(None)) as (model, optimizer):
            steps(case, model, optimizer, 0, 2)
            case = replace(case, expected=training._weights(model, case.on(None)))
        for route, (first, others) in ROUTES.items():
            place = Path(folder, route)
            if dist.get_rank() == 0:
                place.mkdir()
            dist.barrier()
            with _begun(case.on(first)) as (model, optimizer):
                steps(case, model, optimizer, 0, 1)
                dist_checkpointing.save(state(model, optimizer), str(place), validate_access_integrity=True)
            for other in others if every else others[: len(others) // 2]:
                with _begun(case.on(other)) as (model, optimizer):
                    loaded = dist_checkpointing.load(state(model, optimizer, True), str(place))
                    model.module.load_state_dict(loaded["model"])
                    optimizer.load_state_dict(loaded["optimizer"])
                    steps(case, model, optimizer, 1, 2)
                    apart = training._weights(model, case.on(other))
                    if other is None:
                        apart = {name: abs(one - case.expected[name]).max() for name, one in apart.items()}
                    found[f"{route} to {other}"] = max(map(float, apart.values()))
    checkpoint.uninstall()
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("every", [False, True])
def test_momentum_goes_on_on_any_grid_and_in_stock(tmp_path: Path, every: bool) -> None:
    for rank in run_ranks(_resumed, 4, str(tmp_path), every):
        assert len(rank) == sum(len(others) for _, others in ROUTES.values()) // (1 if every else 2)
        for route, apart in rank.items():
            assert apart < 1e-9, route


class _LaterMuon:
    """As versions from 0.18 on have it, in a module of another name."""

    def __init__(self, tp_mode: str = "duplicated") -> None:
        self.tp_mode = tp_mode

    def orthogonalize(self, p: Any, grad: Any) -> Any:
        return grad


def test_muon_is_found_where_later_versions_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    places: dict[str, dict[str, Any]] = {"muon": {}, "emerging_optimizers": {"TensorParallelMuon": _LaterMuon}}
    for name, contents in places.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, f"megatron.core.optimizer.{name}", module)
    originals = Originals()
    muon.install(originals)
    try:
        assert _LaterMuon(tp_mode="duplicated").tp_mode == "blockwise"
        assert hasattr(_LaterMuon.orthogonalize, "__wrapped__")
        with pytest.raises(ValueError, match="muon_tp_mode = 'distributed': .* use 'duplicated'"):
            _LaterMuon(tp_mode="distributed")
    finally:
        originals.restore()
    assert _LaterMuon(tp_mode="distributed").tp_mode == "distributed"
