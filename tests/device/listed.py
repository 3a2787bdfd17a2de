"""Experts in lists on the tests' device, dealt out and split: a step, the weights of all ranks given and taken, as on the CPU."""

from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cuda"

from torch import Tensor, nn  # noqa: E402

import axonn_tp  # noqa: E402
from axonn_plugins.config import Ted  # noqa: E402
from axonn_plugins.hosts.deepspeed.ted.on_mesh import split_with_experts  # noqa: E402
from axonn_tp import Grid, Mesh  # noqa: E402
from tests.device import cases  # noqa: E402
from tests.device.cases import ADAMW, case, same  # noqa: E402
from tests.ted_moe.mixtures import mixture, tokens  # noqa: E402

GRIDS = (Grid(gx=2, gdata=2), Grid(gy=2, gz=2))


def stepped(kind: str, grid: Grid, device: str) -> list[Tensor]:
    """Loss, and the whole weights behind a step and behind a step from other weights."""
    mesh, model, found = Mesh(grid, device), mixture(kind), []
    _untie(model)
    split_with_experts(model, mesh, Ted.model_validate({}))
    model.to(mesh.device)
    optimizer, ids = ADAMW(model.parameters()), tokens(mesh.rank("readers")).to(mesh.device)
    with cases.cuda.HostReads(cases.late):
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            axonn_tp.sync_gradients(model.parameters(), mesh)
            optimizer.step()
            optimizer.zero_grad()
            whole = model.state_dict()
            found += [loss.detach(), *(value.clone() for value in whole.values())]
            model.load_state_dict({name: value * 0.5 for name, value in whole.items()})
    mesh.destroy()
    return found


def _untie(model: nn.Module) -> None:
    """Give tied experts scores apart: of equal ones a GPU's top-k may choose others than a CPU's."""
    for name, parameter in model.named_parameters():
        if name.endswith(("gate.weight", "router.weight")):
            parameter.data[1] *= 1.1


@case(4)
def lists() -> None:
    for kind, grid in zip(("a list within", "experts with norms"), GRIDS, strict=True):
        for here, there in zip(*(stepped(kind, grid, device) for device in ("cpu", "cuda")), strict=True):
            same(here, there)
