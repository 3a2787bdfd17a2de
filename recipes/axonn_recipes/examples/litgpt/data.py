"""Data for LitGPT: the source of argparse."""

from __future__ import annotations

from typing import Any

import torch
from litgpt.data import DataModule
from torch.utils.data import DataLoader

from axonn_recipes.examples.text import windows


class Argparse(DataModule):
    """Windows of bytes, in order; as long as the model's context, and one."""

    def connect(self, tokenizer: object = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
        """Take what LitGPT chooses."""
        self.batch_size, self.window = batch_size, (max_seq_length or 32) + 1

    def _loader(self, text: Any) -> DataLoader:
        text = text.flatten()
        samples = text[: len(text) // self.window * self.window].view(-1, self.window)
        return DataLoader(samples.to(torch.int64), self.batch_size)

    def train_dataloader(self) -> DataLoader:
        """Batches to learn from."""
        return self._loader(windows()[0])

    def val_dataloader(self) -> DataLoader:
        """Held out."""
        return self._loader(windows()[1])
