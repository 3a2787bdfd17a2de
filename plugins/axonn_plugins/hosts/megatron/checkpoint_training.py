"""The files of `megatron.training` beside the model and the optimizer: random states, and the ranks that they belong to."""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from megatron.core import parallel_state

from axonn_plugins.config.base import ConfigError
from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.arguments import fail
from axonn_plugins.hosts.megatron.originals import Originals
from axonn_plugins.hosts.megatron.settings import LAYOUTS


def install(module: ModuleType, originals: Originals) -> None:
    """Wrap a `megatron.training.checkpointing` module."""
    originals.wrap(module, "get_rng_state", _as_without_experts)
    originals.wrap(module, "_load_base_checkpoint", _of_these_ranks)


def _as_without_experts(original: Any) -> Any:
    """Ranks of z draw as all data-parallel ones do, and stock Megatron finds no state by expert rank."""

    @wraps(original)
    def get_rng_state(*args: Any, **named: Any) -> Any:
        size = parallel_state.get_expert_model_parallel_world_size
        parallel_state.get_expert_model_parallel_world_size = lambda: 1
        try:
            return original(*args, **named)
        finally:
            parallel_state.get_expert_model_parallel_world_size = size

    return get_rng_state


def _check_grid(load_dir: str, args: Any, checkpoint_args: Any) -> None:
    here, saved = _grid_here(args), _grid_of(checkpoint_args)
    if saved != here:
        fail(
            ConfigError(
                f"--load {load_dir}: files of format torch are of {saved}, not {here}; load them on that grid, and save them with "
                "--ckpt-format torch_dist to go on with another"
            )
        )


def _of_these_ranks(original: Any) -> Any:
    """Files of format torch, which Megatron reads whatever --ckpt-format says, are of one grid's ranks, whose names another grid's ranks may have.

    Megatron compares no sizes then, nor with --finetune, and ends with exit code 0 where this rank has no file.
    """

    @wraps(original)
    def load(load_dir: str, args: Any, *rest: Any, **named: Any) -> Any:
        try:
            found = original(load_dir, args, *rest, **named)
        except SystemExit as stopped:
            if stopped.code or args.exit_on_missing_checkpoint:
                raise
            fail(
                ConfigError(
                    f"--load {load_dir}: files of format torch are of the ranks that saved them, and there is none that can be read for this "
                    f"rank of {_grid_here(args)}; load them on that grid, and save them with --ckpt-format torch_dist to go on with another"
                )
            )
        state, _, _, kind = found
        if getattr(kind, "name", "") == "LEGACY" and "args" in state:
            _check_grid(load_dir, args, state["args"])
        return found

    return load


def _grid(args: Any, gx: int, gy: int, gz: int, layout: str) -> str:
    """The settings that decide a rank's share, in words; the layout does where y splits biases, or not."""
    stages, experts = args.pipeline_model_parallel_size, getattr(args, "expert_model_parallel_size", 1)
    split = getattr(args, "expert_tensor_parallel_size", None) if getattr(args, "num_experts", None) else None
    words = f"gx, gy, gz = {gx}, {gy}, {gz}" + (f" in the {layout} layout" if gy > 1 else "")
    if experts > 1 or split not in (None, gx * gy):
        words += f", experts over {experts} {'rank' if experts == 1 else 'ranks'}, split over {split}"
        words += "," if stages > 1 else ""
    return words + (f" on each of {stages} pipeline stages" if stages > 1 else "")


def _grid_here(args: Any) -> str:
    settings = process_groups.settings()
    return _grid(args, settings.gx, settings.gy, settings.gz, settings.layout)


def _grid_of(saved: Any) -> str:
    """The grid of a checkpoint's arguments; stock Megatron's has x alone."""
    if hasattr(saved, "axonn_gx"):
        return _grid(saved, saved.axonn_gx, saved.axonn_gy, saved.axonn_gz, saved.axonn_layout or LAYOUTS[0])
    return _grid(saved, saved.tensor_model_parallel_size, 1, 1, "")
