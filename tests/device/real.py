"""The cases on a GPU, which their ranks share, with NCCL: ``python -m tests.device gpu [CASE ...]``.

What only the tests' device can tell, who reads too early, is not looked at; values are, and that kernels, streams and NCCL do what the device stands for.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import axonn_tp
from axonn_recipes.gpu_test.launchers import sharing
from axonn_tp import GradientReducer, Grid, Mesh
from tests.device import cuda
from tests.device.cases import GPU, PLAN, case, model_of, rows_of, same

LEFT_OUT = ("tells", "computes", "communicates", "host_waits")
"""Cases of the tests' device itself."""
LEFT_OUT += ("states_few", "pruned_few", "grids_few", "replicas_few", "deepspeed_few")
"""Parts of others."""


class Gpu:
    """What cases ask of the tests' device, by a GPU."""

    @staticmethod
    def races() -> list[str]:
        return []

    @staticmethod
    def forbid(on: bool) -> None:
        torch.cuda.set_sync_debug_mode("error" if on else "default")


def place(rank: int) -> dict[str, str]:
    """The environment of a rank, which sees one GPU."""
    return sharing(rank) | {"LOCAL_RANK": "0"}


def install() -> Any:
    """Have the cases use this machine's GPU."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that no fork finds CUDA in use
    cuda.BACKEND = "cpu:gloo,cuda:nccl"
    cuda.HostReads = lambda late: nullcontext()  # type: ignore[assignment,misc]
    cuda.register = lambda late: None
    return Gpu


@case(2)
def captured() -> None:
    """A dense 4D step is captured in a CUDA graph, with its collectives, clipping and AdamW, and replayed on other batches."""
    for grid in (Grid(gx=2), Grid(gy=2), Grid(gz=2)):
        mesh = Mesh(grid, "cuda")
        for here, there in zip(_trained(mesh, False), _trained(mesh, True), strict=True):
            same(here, there)
        mesh.destroy()


def _trained(mesh: Mesh, graphed: bool) -> list[Tensor]:
    """Losses and weights of six steps, of which the last three are replayed."""
    model = axonn_tp.parallelize(model_of(), mesh, PLAN).to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
    reducer = GradientReducer(model.parameters(), mesh)
    batch = mesh.shard_batch(rows_of(0)).to(GPU)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        reducer.finish()
        axonn_tp.clip_grad_norm_(model.parameters(), mesh, 0.1)
        optimizer.step()
        return loss.detach()

    side, losses = torch.cuda.Stream(), []
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for number in range(3):
            batch.copy_(mesh.shard_batch(rows_of(number)))
            losses.append(step().clone())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    if graphed:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss = step()
    for number in range(3, 6):
        batch.copy_(mesh.shard_batch(rows_of(number)))
        if graphed:
            graph.replay()
        else:
            loss = step()
        losses.append(loss.clone())
    return [torch.stack(losses).cpu(), *(parameter.detach().cpu() for parameter in model.parameters())]
