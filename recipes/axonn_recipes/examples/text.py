"""Text that every machine has."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import torch

WINDOW = 33


def windows() -> tuple[Any, Any]:
    """The source of argparse as bytes below 128 in windows (samples, WINDOW): to learn from, and 128 that are held out."""
    text = torch.tensor([byte for byte in inspect.getsource(argparse).encode() if byte < 128])
    found = text[: len(text) // WINDOW * WINDOW].view(-1, WINDOW)
    return found[:-128], found[-128:]
