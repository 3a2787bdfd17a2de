"""A GPT with MoE layers: in one process that routes the tokens of every batch rank by itself, and split over a mesh with its experts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import axonn_tp
from axonn_plugins.config import Ted
from axonn_plugins.hosts.deepspeed.ted.on_mesh import split_with_experts
from axonn_plugins.hosts.deepspeed.ted.recompute import Stashes
from axonn_recipes.models.gpt import GPTConfig
from axonn_recipes.models.moe_gpt import MoEGPT
from axonn_tp import Grid, LayerPlan, Mesh, Options, layout_of
from axonn_tp.checkpoint.dealt import DealtNames
from axonn_tp.checkpoint.whole import assemble
from tests.axonn_tp.test_grids import gpt_plan

EXPERTS, BATCH, CLIP = 4, 8, 0.05
CONFIG = GPTConfig(vocabulary=50, context=7, layers=2, heads=8, hidden=32)
PAIRS = {
    name: LayerPlan(layer.kind, layer.parts, layer.heads)
    for name, layer in gpt_plan(CONFIG.heads).items()
    if layer.kind in ("normal", "transposed")
}
PLANS: dict[str, Any] = {"stream": gpt_plan(CONFIG.heads), "pairs": PAIRS, "auto": "auto"}
PLANS["cuts heads"] = {**PLANS["stream"], "*.qkv": LayerPlan("normal", parts=1, heads=8)}
GATES: dict[str, dict[str, Any]] = {
    "k 1": {"k": 1, "drop_tokens": False},
    "k 2": {"k": 2, "drop_tokens": False},
    "k 1, drops": {"k": 1, "capacity_factor": 0.8, "min_capacity": 1},
    "k 2, drops, residual": {"k": 2, "capacity_factor": 0.7, "min_capacity": 1, "use_residual": True},
}


@dataclass(frozen=True)
class Case:
    """One run on a mesh."""

    grid: Grid
    ep_size: int = 1
    gate: str = "k 2"
    plan: str = "stream"
    options: Options = Options()
    ted: dict[str, Any] = field(default_factory=dict)
    checkpoint: Callable[..., Any] | None = None
    stash: bool = False

    def __str__(self) -> str:
        grid, how = self.grid, ("stashed" if self.stash else "checkpointed") if self.checkpoint else ""
        sizes = f"{grid.gx}x{grid.gy}x{grid.gz}x{grid.gdata}"
        return f"{sizes} ep {self.ep_size}, {self.gate}, {self.plan}, {self.options.layout}, {self.ted} {how}"


def build(gate: str, ep_size: int, again: Callable[..., Any] | None = None) -> MoEGPT:
    deepspeed.utils.groups.mpu = None
    torch.manual_seed(1)

    def moe(hidden: int, expert: nn.Module) -> nn.Module:
        return MoE(hidden, expert, EXPERTS, ep_size, use_rts=False, top2_2nd_expert_sampling=False, **GATES[gate])

    return MoEGPT(CONFIG, moe, aux_weight=0.1, checkpoint=again).double()


@cache
def serial(gate: str) -> MoEGPT:
    """All experts, each other ones."""
    model = build(gate, 1)
    torch.manual_seed(2)
    for parameter in model.parameters():
        parameter.data = 0.2 * torch.randn_like(parameter) + (parameter.dim() == 1)
    return model


def copied(gate: str) -> MoEGPT:
    """Another model with these weights."""
    model = build(gate, 1)
    model.load_state_dict(serial(gate).state_dict())
    return model


def batches() -> Tensor:
    torch.manual_seed(3)
    return torch.randint(CONFIG.vocabulary, (BATCH, CONFIG.context + 1))


@cache
def expected(gate: str, parts: int) -> dict[str, Any]:
    """Results of one process whose batch is that of so many ranks."""
    model = copied(gate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, aux = [], []
    for ids in batches().chunk(parts):
        loss = model(ids[:, :-1], ids[:, 1:])
        (loss / parts).backward()
        losses.append(loss.item())
        aux.append([layer.deepspeed_moe.l_aux.item() for layer in moe_layers(model)])
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
    optimizer.step()
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {"losses": losses, "aux": aux, "gradients": gradients, "norm": norm, "weights": weights}


def moe_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def part_of(model: nn.Module, full: dict[str, Tensor], first: int) -> dict[str, Tensor]:
    """This rank's tensors; its experts are those from the `first` on."""
    mine = {}
    for name in model.state_dict():
        before, experts, after = name.partition(".deepspeed_experts.")
        number, _, rest = after.partition(".")
        mine[name] = full[f"{before}{experts}{int(number) + first}.{rest}" if experts else name]
    return mine


def start(case: Case, mesh: Mesh) -> MoEGPT:
    """The model on the mesh."""
    model = build(case.gate, case.ep_size, case.checkpoint)
    plane = case.grid.gx * case.grid.gy
    rank = dist.get_rank() % case.grid.world
    place = rank // (1 if case.ted.get("expert_tensor_parallel") is False else plane) % case.ep_size
    model.load_state_dict(part_of(model, serial(case.gate).state_dict(), place * EXPERTS // case.ep_size))
    split_with_experts(model, mesh, Ted.model_validate(case.ted), PLANS[case.plan], case.options)
    return model


def whole(model: nn.Module, mesh: Mesh, of: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    """Every rank's tensors put together, by the serial model's names; gathered in one call."""
    found, names = {}, DealtNames(model)
    values = {name: of(parameter).detach() for name, parameter in model.named_parameters()}
    flat = torch.cat([value.reshape(-1) for value in values.values()])
    everyone = [torch.empty_like(flat) for _ in range(mesh.grid.world)]
    dist.all_gather(everyone, flat, group=mesh.group("grid"))
    sizes = [value.numel() for value in values.values()]
    of_each = zip(*(rank.split(sizes) for rank in everyone), strict=True)
    for (name, parameter), pieces in zip(model.named_parameters(), of_each, strict=True):
        shares = [piece.view_as(values[name]) for piece in pieces]
        for home, tensor in enumerate(assemble(shares, layout_of(parameter), mesh)):
            found[names.outward(name, home)] = tensor
    return found


def errors(case: Case, mesh: Mesh) -> dict[str, float]:
    """The largest differences from one process."""
    wanted = expected(case.gate, case.grid.batch)
    model = start(case, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    ids, place = mesh.shard_batch(batches()), mesh.rank("batch")
    with Stashes("device").recording() if case.stash else nullcontext():
        loss = model(ids[:, :-1], ids[:, 1:])
    aux = [layer.deepspeed_moe.l_aux.item() for layer in moe_layers(model)]
    loss.backward()
    axonn_tp.sync_gradients(model.parameters(), mesh)
    found = {
        "loss": abs(loss.item() - wanted["losses"][place]),
        "aux": max(abs(a - b) for a, b in zip(aux, wanted["aux"][place], strict=True)),
        "gradients": farthest(whole(model, mesh, lambda p: p.grad), wanted["gradients"]),
        "norm": abs(axonn_tp.clip_grad_norm_(model.parameters(), mesh, CLIP).item() - wanted["norm"]),
    }
    optimizer.step()
    found["weights"] = farthest(whole(model, mesh, lambda p: p), wanted["weights"])
    if mesh.grid.world == dist.get_world_size():
        full = axonn_tp.full_state_dict(model, mesh)
        found["full_state_dict"] = farthest(full, wanted["weights"]) if full else 0.0
    return found


def farthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted)


REENTRANT, PLAIN = (partial(checkpoint, use_reentrant=kind) for kind in (True, False))
