"""Masked dense training: the reference of compressed state."""

import torch
from torch import nn


class Masked:
    """The same optimizer on dense float32 weights; gradients and weights are masked at every step."""

    def __init__(self, factory, model, masks, max_norm=None):
        self.model, self.max_norm = model, max_norm
        self.parameters = dict(model.named_parameters())
        self.masks = {
            name: masks.get(name, torch.ones_like(p, dtype=torch.bool)) for name, p in self.parameters.items()
        }
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.mul_(self.masks[name])
        self.low = next(iter(self.parameters.values())).dtype in (torch.bfloat16, torch.float16)
        self.masters = {name: p.detach().float() if self.low else p for name, p in self.parameters.items()}
        self.optimizer = factory(
            [{"params": [self.masters[name] for name, p in self.parameters.items() if p.requires_grad]}]
        )

    @torch.no_grad()
    def step(self, scale=1.0):
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            master = self.masters[name]
            master.grad = None if gradient is None else (gradient * self.masks[name]).to(master.dtype) / scale
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.masters.values(), self.max_norm)
        self.optimizer.step()
        for name, parameter in self.parameters.items():
            self.masters[name].mul_(self.masks[name])
            parameter.copy_(self.masters[name])
            parameter.grad = None
