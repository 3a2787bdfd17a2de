"""DeepSpeed trains on the tests' device, under several keys of the block at once, beside a plain loop on the CPU.

Its groups are those that it makes for NCCL: they move no tensor of the CPU, and are split from the world's, which is told its
device, as DeepSpeed does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

os.environ["DS_ACCELERATOR"] = "cuda"

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import axonn_plugins  # noqa: E402
from axonn_plugins.pccl import device_tuner  # noqa: E402
from axonn_plugins.pccl.backend import planner  # noqa: E402
from tests.compose.training import ACCUMULATION, Case, obeyed, readers_of, serial_run, start  # noqa: E402
from tests.device.cases import REAL, case  # noqa: E402
from tests.device.replicas import apart  # noqa: E402
from tests.noisy import noisy  # noqa: E402

GPU = torch.device("cuda", 0)
PRUNED, OFFLOAD, GOLDFISH = {"sparsity": 0.8}, {"bucket_size": 1024}, {"k": 2, "h": 3}


def grid(**sizes: Any) -> dict[str, Any]:
    return {"plan": "auto", **sizes}


FLAT = {
    "dense, ZeRO-0": Case({"tensor_parallel": grid(gx=2, gz=2)}),
    "pruned, ZeRO-1": Case({"tensor_parallel": grid(gy=2), "samo": PRUNED, "goldfish": GOLDFISH}, 1),
    "experts, ZeRO-2": Case({"tensor_parallel": grid(gx=2), "ted": {}, "offload_optimizer": OFFLOAD}, 2, 2),
    "experts, ZeRO-1": Case({"ted": {"tensor": 2}, "samo": PRUNED, "offload_optimizer": OFFLOAD}, 1, 2),
    "experts, ZeRO-0": Case({"ted": {}, "tensor_parallel": grid(gz=2), "goldfish": GOLDFISH}, 0, 2),
}
STAGED = {
    "2 stages": Case({"tensor_parallel": grid(gx=2), "samo": PRUNED, "offload_optimizer": OFFLOAD}, 1, None, 2, True),
    "2 stages, experts": Case({"ted": {}, "samo": PRUNED, "goldfish": GOLDFISH}, 1, 2, 2),
    "2 stages, alone": Case({"pipeline": {}}, 1, None, 2, True),
    "4 stages": Case({"samo": PRUNED, "offload_optimizer": OFFLOAD, "goldfish": GOLDFISH}, 0, None, 4, True),
}


def train(engine: Any, run: Case) -> tuple[list[float], list[float]]:
    """Losses and norms."""
    readers = readers_of(run, engine)
    mesh = getattr(engine, "mesh", None)
    reader = mesh.rank("readers") if mesh is not None else engine.grid.get_data_parallel_id()
    losses, norms = [], []
    for step in run.batches(readers):
        micros = [(ids[:, :-1].to(GPU), ids[:, 1:].to(GPU)) for ids in step[:, reader]]
        if run.stages:
            loss = engine.train_batch(iter(micros))
        else:
            loss = torch.zeros((), dtype=torch.float64, device=GPU)
            for ids, labels in micros:
                part = engine(ids, labels)
                engine.backward(part)
                engine.step()
                loss += part.detach() / ACCUMULATION
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        losses.append(loss.item())
        norm = engine.get_global_grad_norm()
        norms.append(None if norm is None else float(norm))
    return losses, norms


def compare(run: Case) -> None:
    """Losses and norms of the engine are those of the plain loop."""
    engine = start(run)
    assert engine.device == GPU and engine.device == next(engine.module.parameters()).device
    obeyed(engine, run)
    found = train(engine, run)
    readers = readers_of(run, engine)
    if run is FLAT["dense, ZeRO-0"]:
        _change_whole(list(engine.module.parameters()))
    if run is STAGED["2 stages, alone"]:
        _shapes_are_apart(engine)
    engine.destroy()
    dist.barrier()
    for here, there in zip(serial_run(run, readers), found, strict=True):
        known = [(a, b) for a, b in zip(here, there, strict=dist.get_rank() == 0) if b is not None]
        # Experts' gates are of float32, which a GPU rounds otherwise than the CPU.
        assert all(abs(a - b) < (1e-7 if REAL else 1e-10) * abs(a) for a, b in known), (here, there)


@torch.no_grad()
def _change_whole(parameters: list[torch.Tensor]) -> None:
    """Read whole parameters, have one rank change them, and read them again."""
    found = []
    for modifier in (None, 0, None):
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier):
            found.append([parameter.clone() for parameter in parameters])
            if modifier == dist.get_rank():
                torch._foreach_add_(parameters, 1)
    assert all(torch.equal(before + 1, after) for before, after in zip(found[0], found[2], strict=True))


def _shapes_are_apart(engine: Any) -> None:
    """Of microbatches with new shapes the first is by itself in the pipeline; with shapes that are known both are under way."""
    assert ACCUMULATION == 2
    ids = torch.zeros(4, 3, dtype=torch.long, device=GPU)
    done: list[tuple[str, int]] = []
    run = engine._run

    def noted(stage: Any, action: Any, *rest: Any) -> None:
        done.append((action.kind, action.microbatch))
        run(stage, action, *rest)

    with patch.object(engine, "_run", noted):
        for _ in range(2):
            engine.train_batch(iter([(ids, ids)] * ACCUMULATION))
    if engine.is_first_stage():
        forth, back = [("forward", number) for number in range(2)], [("backward", number) for number in range(2)]
        assert done == [forth[0], back[0], forth[1], back[1], *forth, *back], done


def stay_replicas(run: Case) -> None:
    """Replicas of parameters are the same after many steps in which no two ranks compute a gradient to the same bits."""
    with noisy((torch.nn.functional, "scaled_dot_product_attention"), (torch.nn.functional, "gelu")):
        engine = start(run)
        train(engine, run)
    found = apart(engine.module, engine.mesh)
    engine.destroy()
    dist.barrier()
    assert not found, found


def compare_all(runs: dict[str, Case], compare: Callable[[Case], None] = compare) -> None:
    os.environ["LOCAL_RANK"] = "0"  # each process has a device of its own
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    axonn_plugins.activate()
    dist.init_process_group("nccl", timeout=timedelta(seconds=60), device_id=GPU)
    deepspeed.init_distributed(verbose=False)
    assert dist.get_backend() == "nccl" and torch.device("cpu") not in dist.group.WORLD._device_types  # type: ignore[union-attr]
    for name, run in runs.items():
        try:
            compare(run)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


@case(4, world=False)
def deepspeed_few() -> None:
    """What is in every run; the rest is in those of all cases."""
    compare_all({name: (FLAT | STAGED)[name] for name in ("dense, ZeRO-0", "2 stages, alone")})


@case(4, world=False)
def deepspeed_flat() -> None:
    compare_all(FLAT)


@case(4, world=False)
def deepspeed_stages() -> None:
    compare_all(STAGED)


@case(4, world=False)
def deepspeed_replicas() -> None:
    replicated, many = {"layout": "replicated"}, {"steps": 20}
    compare_all(
        {
            "ZeRO-1": Case({"tensor_parallel": grid(gy=2, gz=2, **replicated), "samo": PRUNED}, 1, **many),
            "experts, ZeRO-2": Case({"ted": {"tensor": 2}, "offload_optimizer": OFFLOAD}, 2, 2, **many),
            "2 stages": Case({"tensor_parallel": grid(gy=2, **replicated), "pipeline": {}}, 1, None, 2, True, **many),
        },
        stay_replicas,
    )


@case(4, world=False)
def deepspeed_pccl() -> None:
    """In front of NCCL, as the block has it, on two nodes of two ranks."""
    pccl = {"algorithm": "hierarchical", "ranks_per_node": 2}
    compare_all(
        {
            "a grid": Case({"tensor_parallel": grid(gx=2), "samo": PRUNED, "pccl": pccl}, 1),
            "2 stages": Case({"tensor_parallel": grid(gz=2), "offload_optimizer": OFFLOAD, "pccl": pccl}, 1, None, 2),
        }
    )


@case(2, world=False)
def deepspeed_pccl_auto() -> None:
    with patch.object(device_tuner, "SIZES", (2**10, 2**14)):
        compare_all({"a grid": Case({"tensor_parallel": grid(gz=2), "pccl": {"ranks_per_node": 1}}, 0)})
    for times in planner(device="cuda").measured.times.values():
        assert all(len(each) > 1 for each in times.values())


@case(3, world=False)
def deepspeed_stages_3() -> None:
    compare_all({"3 stages": Case({"samo": PRUNED, "goldfish": GOLDFISH}, 1, None, 3, True)})


@case(6, world=False)
def deepspeed_stages_3_of_2() -> None:
    compare_all(
        {
            "a grid": Case({"tensor_parallel": grid(gx=2), "samo": PRUNED, "offload_optimizer": OFFLOAD}, 1, None, 3),
            "experts": Case({"ted": {}, "samo": PRUNED, "goldfish": GOLDFISH}, 1, 2, 3),
            "replicas": Case({"offload_optimizer": OFFLOAD, "goldfish": GOLDFISH}, 0, None, 3, True),
        }
    )


@case(8, world=False)
def deepspeed_flat_8() -> None:
    compare_all(FLAT)


@case(8, world=False)
def deepspeed_stages_8() -> None:
    compare_all(STAGED)
