"""A character model learns the source of argparse, in a loop of one's own under Lightning Fabric."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from axonn_plugins.hosts.lightning import AxonnStrategy
from axonn_recipes.examples.text import windows

WIDTH, BATCH = 64, 32


class Characters(nn.Module):
    """Predicts each byte from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH)
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.fc2 = nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, text: Tensor) -> Tensor:
        """Scores of the next byte."""
        x = self.embedding(text)
        return self.head(x + self.fc2(nn.functional.gelu(self.fc1(x))))


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """Mean cross-entropy of windows, in nats a byte."""
    return nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def main(arguments: Sequence[str] | None = None) -> float:
    """Train; returns the loss of what is held out, in nats a byte."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    for axis in ("gx", "gy", "gz"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoint", type=Path, default=None, help="read where it exists, and written at the end")
    options = parser.parse_args(arguments)

    strategy = AxonnStrategy(gx=options.gx, gy=options.gy, gz=options.gz) if options.devices > 1 else "auto"
    fabric = L.Fabric(accelerator="cpu", devices=options.devices, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0)
    model = Characters()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    # `world_size` counts the ranks that read different data.
    batch = BATCH // fabric.world_size
    training, held_out = fabric.setup_dataloaders(*(DataLoader(part, batch) for part in windows()))

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if options.checkpoint is not None and options.checkpoint.exists():
        fabric.load(options.checkpoint, state)
    for number, text in enumerate(training):
        if number < state["step"]:
            continue
        if number == options.steps:
            break
        fabric.backward(loss_of(model, text))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
    if options.checkpoint is not None:
        fabric.save(options.checkpoint, state)
    with torch.no_grad():
        loss = torch.stack([loss_of(model, text) for text in held_out]).mean()
    found = float(fabric.all_reduce(loss))
    fabric.print(f"{state['step']} steps: loss {found:.6f}")
    return found


if __name__ == "__main__":
    main()
