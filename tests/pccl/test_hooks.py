"""Callbacks on futures that themselves wait for collectives, as torch's communication hooks for data parallelism do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.optim import ZeroRedundancyOptimizer

from axonn_plugins.cluster.launch import launch
from axonn_plugins.pccl.build import load
from tests.pccl.stress import join

RANKS = 3


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Before ranks are forked, whose time is limited."""
    load()


def _chain() -> None:
    """Callbacks that wait for the future of another call, many at a time and three deep."""
    _, size = join(timeout=30)

    def again(number: int, depth: int) -> Callable[[Any], Any]:
        def called(done: Any) -> Any:
            value = done.value()[0]
            if depth == 0:
                return value
            work = dist.all_reduce(value.clone(), async_op=True)
            assert work is not None
            return work.get_future().then(again(number, depth - 1)).wait()

        return called

    for depth in range(4):
        futures = []
        for number in range(5):
            work = dist.all_reduce(torch.full((3,), number + 1.0), async_op=True)
            assert work is not None
            futures.append(work.get_future().then(again(number, depth)))
        for number, future in enumerate(futures):
            assert future.wait().tolist() == [(number + 1.0) * size ** (depth + 1)] * 3
        dist.barrier()
    dist.destroy_process_group()


def test_callbacks_may_wait_for_other_calls() -> None:
    launch(_chain, RANKS)


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 1))


def _gradients(hook: Callable[..., Any] | None, state: Any) -> list[torch.Tensor]:
    """Of the last of three backward passes, each on this rank's own data."""
    # A cold start's state is of one bucket: each bucket's last callback forgets those of all.
    cold = isinstance(state, powerSGD_hook.PowerSGDState) and not state.warm_start
    model = nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=25 if cold else 0.001)
    if hook is not None:
        model.register_comm_hook(state, hook)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(5, 20, generator=generator)).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _power(**options: Any) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=20, start_powerSGD_iter=2, **options)


def _hooks() -> dict[str, tuple[Callable[..., Any], Callable[[], Any], float]]:
    """By name: the hook, its state, and how far it may be from plain averages, in parts of the largest gradient."""
    local = post_localSGD_hook.PostLocalSGDState
    return {
        "allreduce": (default_hooks.allreduce_hook, lambda: None, 1e-6),
        "fp16": (default_hooks.fp16_compress_hook, lambda: None, 1e-2),
        "PowerSGD": (powerSGD_hook.powerSGD_hook, _power, 1e-3),
        "PowerSGD, cold": (powerSGD_hook.powerSGD_hook, lambda: _power(warm_start=False), 1e-3),
        "PowerSGD in half": (default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), _power, 5e-2),
        "quantised": (quantization_hooks.quantization_pertensor_hook, lambda: None, 3e-2),
        "quantised by channel": (quantization_hooks.quantization_perchannel_hook, lambda: None, 3e-2),
        "local": (post_localSGD_hook.post_localSGD_hook, lambda: local(None, None, 100), 1e-6),
    }


def _compare() -> dict[str, float]:
    join(timeout=30)
    plain = _gradients(None, None)
    largest = max(gradient.abs().max() for gradient in plain)
    found = {}
    for name, (hook, state, _) in _hooks().items():
        made = _gradients(hook, state())
        found[name] = float(max((a - b).abs().max() for a, b in zip(made, plain, strict=True)) / largest)
    dist.destroy_process_group()
    return found


def test_torchs_communication_hooks_average_gradients() -> None:
    limits = {name: limit for name, (_, _, limit) in _hooks().items()}
    for found in launch(_compare, RANKS):
        wrong = {name: error for name, error in found.items() if not error <= limits[name]}
        assert not wrong, wrong


def _with_zero(overlaps: bool) -> list[float]:
    """Losses with an optimizer whose step is taken within the hooks, or after them."""
    join(timeout=30)
    model = nn.parallel.DistributedDataParallel(_model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=overlaps, lr=0.1, momentum=0.5
    )
    if overlaps:
        hook = ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer)
        model.register_comm_hook(None, hook)
    generator = torch.Generator().manual_seed(dist.get_rank())
    data = torch.randn(5, 20, generator=generator)
    losses = []
    for _ in range(6):
        loss = model(data).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        model.zero_grad()
    dist.destroy_process_group()
    return losses


def test_an_optimizer_within_the_hooks_takes_the_same_steps() -> None:
    plain, hooked = (launch(_with_zero, RANKS, overlaps) for overlaps in (False, True))
    for ours, theirs in zip(plain, hooked, strict=True):
        # Buckets are made anew in the first iterations, in which the hook takes no step.
        late = [loss for loss in theirs if loss != theirs[0]]
        assert late and torch.allclose(torch.tensor(late), torch.tensor(ours[1 : 1 + len(late)]), rtol=1e-5)
