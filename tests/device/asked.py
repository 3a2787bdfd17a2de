"""What hosts ask of all ranks beside gradients: each question on the device is waited for before its answer is read."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import axonn_tp
import ted_moe
from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common import replicas
from axonn_tp import Grid, Mesh
from ted_moe.agreement import same_seed
from tests.device import cases
from tests.device.cases import ADAMW, GPU, PLAN, case, model_of, rows_of, same

TRANSFORMERS = "axonn_plugins.hosts.transformers"


def import_hosts() -> None:
    """Import what cases ask, before ranks are forked that would each import it."""
    for name in ("deepspeed", "gradients", "norms", "replicas", "states", "strategy"):
        importlib.import_module(f"axonn_plugins.hosts.lightning.{name}")
    for name in ("padded_targets", "neftune", "accelerate_patch", "unfilled", "means", "readers", "balance"):
        importlib.import_module(f"{TRANSFORMERS}.{name}")
    for name in ("checkpoint_optimizer", "moe", "parameters"):
        importlib.import_module(f"axonn_plugins.hosts.megatron.{name}")


def split_model(mesh: Mesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with gradients, and AdamW behind a step."""
    model = axonn_tp.parallelize(model_of(), mesh, PLAN).to(GPU)
    model(rows_of(0).to(GPU)).square().mean().backward()
    optimizer = ADAMW(model.parameters())
    optimizer.step()
    return model, optimizer


@case(2)
def asked_by_lightning() -> None:
    from axonn_plugins.hosts.lightning import deepspeed, gradients, norms, states, strategy
    from axonn_plugins.hosts.lightning import replicas as compared

    mesh = Mesh(Grid(gx=2), "cuda")
    model, optimizer = split_model(mesh)
    first, second = gradients.Gradients(model, mesh), gradients.Gradients(model_of().to(GPU), mesh)
    torch.use_deterministic_algorithms(True)
    for _ in range(2):  # behind the first, nothing else is waited for
        model(rows_of(0).to(GPU)).square().mean().backward()
        gradients.finish([first, second], mesh)
    torch.use_deterministic_algorithms(False)
    parameters = list(model.parameters())
    for kind in (2.0, float("inf")):
        assert gradients.clip(parameters, mesh, 0.1, kind) > 0
    assert norms._norms(parameters, mesh, float("inf")).cpu().numel() == len(parameters)
    compared.Replicas(mesh).inputs({"ids": rows_of(1).to(GPU)}, "the input")
    compared.Replicas(mesh).loss(torch.ones((), device=GPU))
    with patch.object(compared, "_made", [Mesh(Grid(gz=2), "cuda")]):
        same(torch.tensor(0.5), compared.mean_over_readers(torch.tensor(float(dist.get_rank()), device=GPU)))
    whole = states.whole_state(optimizer, mesh)
    assert dist.get_rank() or whole["state"][0]["exp_avg"].shape == (10, 6)
    one = SimpleNamespace(_mesh=mesh, root_device=GPU)
    with patch.object(deepspeed, "_mesh", lambda given: mesh):
        for decide in (strategy.AxonnStrategy.reduce_boolean_decision, deepspeed._by_all_ranks(lambda *_: False)):
            assert not decide(one, dist.get_rank() == 0) and decide(one, dist.get_rank() == 0, all=False)


@case(2)
def asked_by_transformers() -> None:
    find = lambda name: importlib.import_module(f"{TRANSFORMERS}.{name}")  # noqa: E731
    trainer: Any = SimpleNamespace(model=None, accelerator=SimpleNamespace(device=GPU, num_processes=2))
    padded, noise, patches = find("padded_targets"), find("neftune"), find("accelerate_patch")
    with patch.object(padded, "has_block", lambda accelerator: True):
        padded.refuse_padded_targets(trainer, [{"labels": torch.zeros(2, 3, dtype=torch.long)}])
    loader: Any = DataLoader(range(8), shuffle=True)  # type: ignore[arg-type]
    find("unfilled").redraw(loader, GPU)
    torch.manual_seed(dist.get_rank())
    orders: list[Any] = [None, None]
    dist.all_gather_object(orders, list(loader.sampler))
    assert orders[0] == orders[1] and sorted(orders[0]) == list(range(8))
    assert find("kinds").count_votes(trainer, [True, dist.get_rank() == 0]) == [2, 1]
    with find("readers").as_one_reader(GPU):
        drawn = [torch.empty(1, device=GPU) for _ in range(2)]
        dist.all_gather(drawn, torch.rand(1).to(GPU))
        assert drawn[0].item() == drawn[1].item()
    module: Any = nn.Embedding(8, 4).to(GPU)
    module.neftune_noise_alpha = 1.0
    output = torch.zeros(2, 3, 4, device=GPU)
    with noise.noisy({}):
        found = noise._of_all(lambda *_: output)(module, (torch.zeros(2, 3, device=GPU),), output)
    assert found.abs().sum() > 0
    accelerator: Any = SimpleNamespace(device=GPU, flag_tensor=torch.tensor(dist.get_rank()))
    with patch.object(patches, "same", lambda: 2):
        assert patches._check_trigger(lambda self: bool(self.flag_tensor))(accelerator)
    balance, ones = find("balance"), torch.ones(1 + dist.get_rank(), 2, device=GPU)
    assert balance._rows_of_all(ones).sum().item() == 6
    mean_over_rows = balance._of_rows(lambda rows: rows.mean())
    with patch.object(balance, "_factor", 1.0):
        same(torch.ones(()), mean_over_rows(torch.ones(2, 5, 3, device=GPU)))
        try:
            mean_over_rows(torch.ones(2, 5 + dist.get_rank(), 3, device=GPU))
        except ConfigError as error:
            assert "readers pad their rows to different lengths" in str(error), error
        else:
            raise AssertionError("readers have other lengths")


@case(2)
def asked_by_megatron() -> None:
    from megatron.core.transformer.mlp import MLPSubmodules

    from axonn_plugins.hosts.megatron import checkpoint_optimizer, moe, parameters

    def weights() -> list[nn.Parameter]:
        return [nn.Parameter(torch.full((3,), dist.get_rank() + 1.0, device=GPU)) for _ in range(2)]

    summed: list[Any] = weights()
    for parameter in summed:
        parameter.axonn_sum_over, parameter.main_grad = "x", parameter.detach().clone()
    parameters._sum_partial(summed, Mesh(Grid(gx=2), "cuda"))
    assert summed[1].main_grad.tolist() == [3.0] * 3
    experts: Any = nn.Module()
    made = moe._with_own_experts(lambda self, *_: setattr(self, "local_experts", nn.ParameterList(weights())))
    mesh = SimpleNamespace(experts=SimpleNamespace(ranks=lambda axis: [0, 1]))
    submodules, config = MLPSubmodules(), SimpleNamespace(num_moe_experts=2, use_cpu_initialization=False)
    with (
        patch.object(moe, "mark_expert", lambda parameter: None),
        patch.object(moe, "_group", lambda axis: dist.group.WORLD),
        patch.object(moe.process_groups, "mesh", lambda: mesh),
    ):
        made(experts, 2, config, submodules)
    assert [parameter.tolist() for parameter in experts.local_experts] == [[1.0] * 3] * 2
    inner = SimpleNamespace(state={0: {"step": 4.0}} if dist.get_rank() else {}, param_groups=[{}])
    checkpoint_optimizer._agree_on_step(SimpleNamespace(data_parallel_group=dist.group.WORLD, optimizer=inner))
    assert inner.param_groups[0].get("step", 4.0) == 4.0 and (dist.get_rank() or inner.param_groups[0])


@case(2)
def asked_by_systems() -> None:
    """Pruning by gradients of shares and regrowth, whole weights, first replicas' inputs, one seed."""
    mesh = Mesh(Grid(gx=2), "cuda")
    model, _ = split_model(mesh)
    found = axonn_tp.full_state_dict(model, mesh)
    assert dist.get_rank() or found["up.weight"].shape == (10, 6)
    (rows,), _ = replicas.broadcast_inputs((rows_of(dist.get_rank()).to(GPU),), {}, mesh)
    same(rows_of(0), rows)
    torch.manual_seed(dist.get_rank())
    assert same_seed(ted_moe.topology.Groups(ted_moe.Topology(2, 2, 1))) == 0
    regrow = {"sparsity": 0.5, "regrow": {"interval": 1, "end_step": 9}}
    for stage, block in ((1, {"sparsity": 0.5, "pruner": "snip"}), (0, regrow), (1, regrow)):
        cases._composed(stage, {"samo": block})
