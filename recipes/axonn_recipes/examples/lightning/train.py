"""A character model learns the source of argparse, by Lightning's Trainer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from axonn_plugins.hosts.lightning import AxonnStrategy
from axonn_recipes.examples.text import WINDOW, windows

WIDTH, BATCH = 64, 32


class Characters(L.LightningModule):
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

    def loss(self, text: Tensor) -> Tensor:
        """Mean cross-entropy of windows (samples, WINDOW), in nats."""
        return nn.functional.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, text: Tensor, number: int) -> Tensor:
        """One batch."""
        return self.loss(text)

    def validation_step(self, text: Tensor, number: int) -> None:
        """One batch that is held out."""
        self.log("val_loss", self.loss(text), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train; returns the loss of what is held out, in nats a byte."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    for axis in ("gx", "gy", "gz"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", default="checkpoints")
    parser.add_argument("--resume", default=None, help="a checkpoint, of any sizes")
    options = parser.parse_args(arguments)

    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=AxonnStrategy(gx=options.gx, gy=options.gy, gz=options.gz) if options.devices > 1 else "auto",
        max_steps=options.steps,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(options.folder, filename="last")],
        logger=False,
        enable_progress_bar=False,
    )
    training, held_out = windows()
    # `world_size` counts the ranks that read different data.
    batch = BATCH // trainer.world_size
    module = Characters()
    trainer.fit(module, DataLoader(training, batch), ckpt_path=options.resume)
    loss = trainer.validate(module, DataLoader(held_out, batch), verbose=False)[0]["val_loss"]
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps of {BATCH} windows of {WINDOW} bytes: val_loss {loss:.6f}", flush=True)
    return loss


if __name__ == "__main__":
    main()
