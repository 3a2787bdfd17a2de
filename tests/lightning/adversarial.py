"""Two models in one loop under Fabric: a loss of the generator goes through the discriminator."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

NOISE, WIDTH, REAL = 6, 16, 12


def alternating(fabric: L.Fabric, penalty: bool) -> list[float]:
    """Steps of a discriminator and of its generator: losses, norms and sums of weights.

    Args:
        fabric: launched.
        penalty: the discriminator's gradient is held at 1, by gradients of gradients.
    """
    draw = torch.Generator().manual_seed(5)
    data = [torch.randn(16, width, generator=draw, dtype=torch.float64) for width in (REAL, NOISE)]
    torch.manual_seed(6)
    generator = nn.Sequential(nn.Linear(NOISE, WIDTH), nn.Tanh(), nn.Linear(WIDTH, REAL))
    discriminator = nn.Sequential(nn.Linear(REAL, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    generator, forging = fabric.setup(generator, Adam(generator.parameters(), lr=1e-2))
    discriminator, judging = fabric.setup(discriminator, Adam(discriminator.parameters(), lr=1e-2))
    found: list[Tensor] = []
    for number, (real, noise) in enumerate(
        fabric.setup_dataloaders(DataLoader(TensorDataset(*data), 4 // fabric.world_size))
    ):
        forged, accumulates = generator(noise), number % 2 == 0 and not penalty
        with fabric.no_backward_sync(discriminator, enabled=accumulates):
            loss = softplus(discriminator(forged.detach())).mean()
            fabric.backward(loss, model=discriminator)
            if penalty:
                between = (real + forged.detach()).requires_grad_()
                (slope,) = torch.autograd.grad(discriminator(between).sum(), between, create_graph=True)
                loss = (slope.norm(dim=1) - 1).square().mean()
            else:
                loss = softplus(-discriminator(real)).mean()
            fabric.backward(loss, model=discriminator)
        if not accumulates:
            found.append(fabric.clip_gradients(discriminator, judging, max_norm=0.5))
            judging.step()
            judging.zero_grad()
        with fabric.no_backward_sync(generator, enabled=accumulates):
            forgery = softplus(-discriminator(forged)).mean()
            fabric.backward(forgery, model=generator)
        # Without a zero_grad of the discriminator, its gradients of this loss count in its next step.
        found += [fabric.all_reduce(value.detach().clone()) for value in (loss, forgery)]
        if not accumulates:
            found.append(fabric.clip_gradients(generator, forging, max_norm=0.5))
            forging.step()
            forging.zero_grad()
    sums = [tensor.sum() for model in (generator, discriminator) for tensor in model.state_dict().values()]
    return [value.item() for value in (*found, *sums)]
