"""One sentence for what a forward cannot do on shares; the first pass of training is compared with the serial one."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import nn

import axonn_tp
from axonn_plugins import config
from axonn_plugins.config import ConfigError
from axonn_tp import Mesh, first_difference
from axonn_tp.context.recomputed import exchange, exchange_function, on_its_tokens

exchange(checkpointing.CheckpointFunction)
exchange_function(checkpointing.non_reentrant_checkpoint, on_its_tokens)

_KEY = "axonn.tensor_parallel.plan"
_LAYERS, _CONTEXT = (Path(axonn_tp.__file__).parent / room for room in ("layers", "context"))
_NOT_THEIRS = tuple(str(Path(package.__file__ or "").parent) for package in (torch, axonn_tp)) + (
    str(Path(config.__file__).parent.parent),
)


def check_plan(model: nn.Module, run: Callable[[], Any], mesh: Mesh, *, half: bool) -> None:
    """Compare a forward pass on shares with the serial one; every rank calls it.

    Args:
        model: a model that `parallelize` split.
        run: one forward pass.
        mesh: the mesh.
        half: true where it computes in 16 bits.

    Raises:
        ConfigError: a layer's output differs, or an operation on shares fails.
    """

    def passed() -> None:
        run()
        checkpointing.reset()  # DeepSpeed's contiguous buffers of activations have room for a pass that a backward follows

    with one_sentence():
        found = first_difference(model, passed, mesh, 0.1 if half else 1e-3)
    if found is not None:
        raise ConfigError(
            f"{_KEY}: the output of layer {found[0]} differs from the serial model's by {found[1]:.1%}; code before it looks across "
            "features that are split, or parts or heads are wrong: correct the plan, or name its layers self_contained"
        )


@contextmanager
def named(key: str) -> Iterator[None]:
    """A check of a plan that a key of the block has found, and no `plan` could correct.

    Raises:
        ConfigError: that of the check, which names the key.
    """
    try:
        yield
    except ConfigError as error:
        if _KEY.startswith(key):
            raise
        found = str(error).removeprefix(f"{_KEY}: ").partition("; ")[0]
        raise ConfigError(
            f"{key}: {found}; code before it looks across features that are split: leave tensor out, or give axonn.tensor_parallel, whose plan "
            "can name its layers self_contained"
        ) from None


@contextmanager
def one_sentence() -> Iterator[None]:
    """A forward pass, whose failures on shares become ConfigErrors; whatever else fails in it stays as it is."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        inside = Path(frames[-1].filename).parent
        if isinstance(error, ConfigError) or inside not in (_LAYERS, _CONTEXT):
            raise
        if inside == _CONTEXT and type(error) is ValueError:
            raise ConfigError(f"axonn.tensor_parallel.gz: {error}") from error
        message = str(error).partition("\n")[0].partition(";")[0]
        # Of torch's errors only those of an operation on a split activation are the plan's: others are of memory, devices or links.
        plain = type(error) is RuntimeError and not any(word in message for word in ("memory", "CUDA"))
        if type(error) is not ValueError and not (plain and Path(frames[-1].filename).name == "activation.py"):
            raise
        raise ConfigError(
            f"{_KEY}: on shares {_place(frames)} fails ({message}); code between a normal and a transposed layer sees a share of the features, and "
            'behind an embedding a share of the tokens: correct the plan, name its layers self_contained, or use "plan": "auto"'
        ) from error


def _place(frames: traceback.StackSummary) -> str:
    """The innermost line that is neither torch's nor ours."""
    frame = next((frame for frame in reversed(frames) if not frame.filename.startswith(_NOT_THEIRS)), frames[-1])
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f'{Path(frame.filename).name}:{frame.lineno} "{line}"'
