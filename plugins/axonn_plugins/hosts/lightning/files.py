"""Checkpoints of Fabric and of the Trainer: one file, or a folder of shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import nn
from torch.optim import Optimizer

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common.complete import everyone
from axonn_tp import Mesh
from axonn_tp.checkpoint import load, save
from axonn_tp.checkpoint.files import MARKER
from axonn_tp.checkpoint.sums import flush


def save_file(io: Any, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
    """Write a file, complete or absent, in the place of one of that name; every rank calls it, and rank 0 writes.

    Raises:
        ConfigError: it cannot be written; the same on every rank.
    """

    def write() -> None:
        if not isinstance(io, TorchCheckpointIO) or "://" in str(path):
            io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        aside = Path(f"{path}.incomplete")
        try:
            io.save_checkpoint(checkpoint, aside, storage_options=storage_options)
            flush(aside)
            os.replace(aside, path)
        except BaseException:
            with suppress(OSError):
                aside.unlink()  # a full disk needs its place
            raise
        flush(Path(path).parent)

    everyone(lambda: None if dist.get_rank() else write())


def is_folder(path: Any) -> bool:
    """True if it is a folder of shards; the older one counts while a newer one takes its place."""
    return any((Path(f"{path}{state}") / MARKER).is_file() for state in ("", ".replaced"))


def save_folder(path: Any, state: Mapping[str, Any], mesh: Mesh, filter: Mapping[str, Callable] | None = None) -> None:
    """Write what Fabric saves; every rank calls it.

    Raises:
        ConfigError: there is not one model, or more than one optimizer, or a filter.
    """
    if filter:
        raise ConfigError('filter= is for state_dict_type = "full"; leave it out, or save one file')
    model, optimizer, rest = _sorted(state)
    extra = {key: value.state_dict() if _stateful(value) else value for key, value in rest.items()}
    save(path, model, mesh, optimizer, extra={"names": list(state), "rest": extra})


def load_folder(path: Any, state: Any, mesh: Mesh, strict: bool) -> dict[str, Any]:
    """Read it into what Fabric loads, on any grid; every rank calls it.

    Returns:
        What was not asked for.

    Raises:
        ConfigError: there is not one model, or more than one optimizer.
    """
    if isinstance(state, nn.Module):
        load(path, state, mesh, strict=strict)
        return {}
    if not isinstance(state, dict) or not any(isinstance(value, nn.Module) for value in state.values()):
        raise ConfigError(
            f'{path} is a folder of shards, which only a model can take in; pass yours, as in fabric.load({str(path)!r}, {{"model": model}})'
        )
    model, optimizer, rest = _sorted(state)
    found = load(path, model, mesh, optimizer, strict=strict)["rest"]
    for key, value in rest.items():
        if key not in found:
            if strict:
                raise KeyError(
                    f"The requested state contains a key '{key}' that does not exist in the loaded checkpoint."
                )
        elif _stateful(value):
            value.load_state_dict(found.pop(key))
        else:
            state[key] = found.pop(key)
    return dict(found)


def _stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _sorted(state: Mapping[str, Any]) -> tuple[nn.Module, Optimizer | None, dict[str, Any]]:
    models = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
    optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
    if len(models) != 1 or len(optimizers) > 1:
        raise ConfigError(
            f"a folder of shards holds one model and at most one optimizer, not {_told('model', models)} and {_told('optimizer', optimizers)}; "
            'use state_dict_type = "full", or a folder for each model with its optimizer'
        )
    rest = {key: value for key, value in state.items() if key not in models and key not in optimizers}
    return next(iter(models.values())), next(iter(optimizers.values()), None), rest


def _told(kind: str, names: Iterable[str]) -> str:
    names = sorted(names)
    return f"the {kind}s {', '.join(names)}" if len(names) > 1 else f"{kind} {names[0]}" if names else f"no {kind}"
