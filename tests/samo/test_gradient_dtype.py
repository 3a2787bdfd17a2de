"""Gradients in float32 of bf16 parameters: accumulated, summed over ranks and shared out without rounding."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import samo
from tests.distributed import run_ranks

FACTORY = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True)
STEPS, MICRO = 3, 3


def batch(step, rank, micro):
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    return torch.randn(5, 7, generator=generator).bfloat16()


def model_and_masks():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3)).bfloat16()
    return model, {"0.weight": torch.rand(13, 7) < 0.4}


def reference():
    """Masked float32 weights, stepped by sums in float32 of every rank's bf16 gradients."""
    model, masks = model_and_masks()
    named = dict(model.named_parameters())
    masters = {name: p.detach().float() * masks.get(name, 1) for name, p in named.items()}
    optimizer = FACTORY(masters.values())
    for step in range(STEPS):
        for name, p in named.items():
            p.data.copy_(masters[name])
        sums = {name: torch.zeros_like(master) for name, master in masters.items()}
        for rank in range(2):
            for micro in range(MICRO):
                model.zero_grad()
                model(batch(step, rank, micro)).square().mean().backward()
                for name, p in named.items():
                    sums[name] += p.grad.float()
        for name, master in masters.items():
            master.grad = sums[name] / 2 * masks.get(name, 1)
        optimizer.step()
    return masters


def distances():
    expected, found = reference(), {}
    for stage in (0, 1, 2):
        for host in (False, True):
            model, masks = model_and_masks()
            world = dist.group.WORLD
            optimizer = samo.Optimizer(
                FACTORY, model, masks, group=world, stage=stage, host=host, gradient_dtype=torch.float32
            )
            for step in range(STEPS):
                for micro in range(MICRO):
                    with optimizer.no_sync():
                        model(batch(step, dist.get_rank(), micro)).square().mean().backward()
                optimizer.step()
            state = samo.dense_state_dict(optimizer)["state"]
            names = [name for name, _ in model.named_parameters()]
            found[stage, host] = max(
                float((state[n]["master"].cpu() - expected[name]).abs().max()) for n, name in enumerate(names)
            )
            assert all(torch.equal(p, expected[name].bfloat16()) for name, p in model.named_parameters())
            assert optimizer.stores[0].gradient.dtype == torch.float32
    return found


def test_sums_are_not_rounded():
    for distance in run_ranks(distances, 2)[0].values():
        assert distance < 1e-6
