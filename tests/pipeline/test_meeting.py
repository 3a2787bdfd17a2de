"""Layers with collectives of their own inside a pass: ranks that meet in them make their passes in one order."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from axonn_plugins.autoload import activate
from tests.distributed import run_ranks
from tests.pipeline.training import WIDTH, Case, Feed, difference, parameters, ready, serial, start, train

activate()


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _mean(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        return _mean(gradients[0], ctx.group), None


def _mean(x: Tensor, group: Any) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


class Meeting(Feed):
    """Of what all ranks of a group have alike, it takes their mean."""

    group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if Meeting.group is None else _Mean.apply(y, Meeting.group)


class Normed(Feed):
    """Behind a BatchNorm, of which all replicas of a stage take one mean."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch(x.transpose(1, 2)).transpose(1, 2))


class Experts(nn.Module):
    """A residual layer of experts on two data-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=2, use_rts=False, capacity_factor=2.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)[0]


def delayed(engine: Any, layers: type[nn.Module]) -> None:
    """Let passes and messages take other times on each rank, so that messages arrive in other orders."""
    draw = random.Random(dist.get_rank())

    def pause(*_: Any) -> None:
        time.sleep(draw.choice([0, 0, 0.003, 0.02]))

    wire = next(iter(engine._transport._outgoing.values())).wire
    original = wire.send

    def send(*arguments: Any) -> Any:
        pause()
        return original(*arguments)

    wire.send = send
    for layer in engine.module.modules():
        if isinstance(layer, layers):
            layer.register_forward_pre_hook(pause)


def meetings() -> dict[str, Any]:
    ready()
    found: dict[str, Any] = {}
    slices = [dist.new_group([first, first + 1]) for first in (0, 2)]
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    case = Case(lambda: [LayerSpec(Meeting) for _ in range(4)], microbatches=7, steps=2, module={"topology": topology})
    wanted, weights = serial(case, 1)
    engine = start(replace(case, stages=None))  # type: ignore[arg-type]
    Meeting.group = slices[dist.get_rank() // 2]
    delayed(engine, Meeting)
    losses = train(engine, case)
    found["model axis"] = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    found["weights"] = difference(parameters(engine), weights)
    engine.destroy()
    norms = {"gx": 1, "gy": 1, "gz": 1, "plan": {}, "sync_batch_norm": True}
    case = Case(lambda: [LayerSpec(Normed) for _ in range(4)], microbatches=7, steps=2, tensor=norms)
    for name, schedule in (("in order", "1f1b"), ("as they come", "message_driven")):
        engine = start(replace(case, block={"schedule": schedule}))
        delayed(engine, Normed)
        found[name] = train(engine, case)
        engine.destroy()
    found["norm"] = norm_of_experts()
    case = Case(lambda: [LayerSpec(Experts) for _ in range(2)], dtype="fp32", microbatches=7, steps=2)
    for name, block in (("stock", None), ("ours", {})):
        engine = start(replace(case, block=block))
        if block is not None:
            delayed(engine, Experts)
        found[name] = train(engine, case), {k: p.sum().item() for k, p in parameters(engine).items()}
        engine.destroy()
    return found


def norm_of_experts() -> tuple[float, float]:
    """The norm that a step clips by, and that of every gradient counted once."""
    engine = start(Case(lambda: [LayerSpec(Experts) for _ in range(2)], microbatches=2, dtype="fp32", clip=0.01))
    original, wanted = engine.clip_fp32_gradients, []

    def clip() -> None:
        once = [p for p in engine.module.parameters() if engine.grid.data_parallel_id == 0 or is_moe_param(p)]
        total = torch.stack([p.grad.double().square().sum() for p in once]).sum()
        dist.all_reduce(total)
        wanted.append(total.sqrt().item())
        original()

    engine.clip_fp32_gradients = clip
    train(engine, Case(microbatches=2, dtype="fp32"), range(1))
    found = engine.get_global_grad_norm(), *wanted
    engine.destroy()
    return found


def test_ranks_that_meet_in_a_pass_keep_one_order() -> None:
    for found in run_ranks(meetings, 4):
        assert found["model axis"] < 1e-10 and found["weights"] < 1e-10, found
        assert found["in order"] == found["as they come"]
        assert found["norm"][0] == pytest.approx(found["norm"][1], rel=1e-5)
        assert found["ours"][0] == pytest.approx(found["stock"][0], rel=1e-6)
        assert found["ours"][1] == pytest.approx(found["stock"][1], rel=1e-6, abs=1e-6)
