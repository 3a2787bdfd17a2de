"""``axonn check``: what a ds_config.json comes to on a number of ranks, without starting any."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from pydantic import ValidationError
from tyro import conf

from axonn_plugins.cli.check_script import notes
from axonn_plugins.cli.options import read
from axonn_plugins.config import batch
from axonn_plugins.config.base import ConfigError
from axonn_plugins.observe.clock import elapsed

_CONSTANTS = (
    "runtime.constants",
    "runtime.activation_checkpointing.config",
    "runtime.data_pipeline.constants",
    "runtime.zero.config",
    "autotuning.constants",
    "compression.constants",
    "elasticity.constants",
    "monitor.constants",
    "nebula.constants",
    "profiling.constants",
    "runtime.swap_tensor.constants",
)
"""Modules of DeepSpeed that name the keys of its configuration."""
_MORE = (
    "axonn",
    "comms_logger",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "compile",
    "hybrid_engine",
    "inference",
    "tensor_parallel",
)
_BATCH = batch.KEYS
_DRAWN = 256
"""The most ranks that are shown one by one."""


@dataclass(frozen=True)
class Options:
    """The verdict on a ds_config.json without starting a rank: whether it is obeyed, the grid, who reads what, and with --model plan and memory.

    Attributes:
        config: the path of ds_config.json.
        script: the training script, which is read and not run.
        ranks: processes that are to train.
        model: the path of HF's config.json, or a name that axonn samo memory knows: prints the plan of its layers and the bytes of a rank.
    """

    config: Annotated[conf.Positional[Path], conf.arg(metavar="DS_CONFIG")]
    script: Annotated[conf.Positional[Path | None], conf.arg(metavar="SCRIPT")] = None
    ranks: int = 1
    model: str | None = None


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code, 1 where the configuration is refused.

    Raises:
        ConfigError: the file cannot be read, or an option is wrong.
    """
    parsed = read(Options, arguments, "axonn check")
    if parsed.ranks < 1:
        raise ConfigError(f"--ranks = {parsed.ranks} is not a number of ranks; use 1 or more")
    raw, filled_in = load(parsed.config)
    for key in unknown(raw):
        print(f"note: {key}")
    try:
        with elapsed("asking DeepSpeed"):
            lines, grid, block = verdict(raw, parsed.ranks, filled_in)
    except ConfigError as error:
        print(f"{parsed.config} on {parsed.ranks} ranks: refused\n{error}")
        return 1
    print(f"{parsed.config} on {parsed.ranks} ranks: obeyed", *lines, sep="\n")
    if parsed.script is not None:
        replicas = 1 if grid is None else grid.world // grid.readers
        print(*notes(parsed.script, _keys(block), replicas), sep="\n")
    if parsed.model is not None:
        with elapsed("finding the plan"):
            lines = [*layers(block, raw, grid, parsed.model, parsed.ranks)]
        print(*lines, sep="\n")
    return 0


def load(file: Path) -> tuple[dict[str, Any], list[str]]:
    """Read a ds_config.json as DeepSpeed does; values "auto" of the HF Trainer's are left out, which fills them in.

    Returns:
        The configuration, and which keys of the batch were "auto".

    Raises:
        ConfigError: it is not there, no JSON, no object, or has no block.
    """
    try:
        with _quietly():
            from axonn_plugins.hosts.deepspeed.patch import parsed

            raw = parsed(file.read_text())
    except OSError as error:
        raise ConfigError(f'"{file}" cannot be read: {error.strerror}; give the path of a ds_config.json') from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f'"{file}" is not JSON: {" ".join(str(error).split())}; correct it') from None
    if not isinstance(raw, dict) or raw.get("axonn") is None:
        raise ConfigError(
            f'"{file}" has no "axonn" block; add one, such as "axonn": {{"tensor_parallel": {{"gx": 2}}}}'
        )
    rest = {key: value for key, value in raw.items() if key != "axonn"}
    left = {"axonn": raw["axonn"], **_filled(rest)}
    return left, [key for key in _BATCH if raw.get(key) == "auto"]


def _filled(value: Any) -> Any:
    return {k: _filled(v) for k, v in value.items() if v != "auto"} if isinstance(value, dict) else value


def unknown(raw: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on keys that DeepSpeed does not read, which it passes over without a word."""
    with _quietly():
        known = set(_MORE)
        for name in _CONSTANTS:
            try:
                module = importlib.import_module(f"deepspeed.{name}")
            except ImportError:  # of another version
                continue
            known |= {v for v in vars(module).values() if isinstance(v, str) and re.fullmatch(r"[a-z][a-z0-9_]*", v)}
    for key in raw:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.0)[0]
            yield f'"{key}" is no key that DeepSpeed reads; the nearest is "{near}"'


def verdict(raw: dict[str, Any], ranks: int, filled_in: Sequence[str] = ()) -> tuple[list[str], Any, Any]:
    """Check a configuration as `deepspeed.initialize` would.

    Args:
        raw: the configuration.
        ranks: processes that are to train.
        filled_in: keys of the batch that are not in it, since the HF Trainer fills them in.

    Returns:
        Lines on it, the grid (None where the block splits no layer or its sizes are "auto"), and the block.

    Raises:
        ConfigError: it is refused.
    """
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(ranks)
    try:
        with _quietly():
            from deepspeed.runtime.config import DeepSpeedConfig

            from axonn_plugins import config
            from axonn_plugins.hosts.deepspeed import config_hook, states_config
            from axonn_plugins.hosts.deepspeed.optim.wrapped import check_optimizer
            from axonn_plugins.hosts.deepspeed.spellings import as_understood

            block = config.parse(raw["axonn"])
            open_sizes = block.tensor_parallel is not None and len(block.tensor_parallel.given) < 3
            stood_in = _stand_in(raw, ranks, open_sizes) if filled_in else {}
            unit, _ = config_hook.configure(SimpleNamespace(), raw | stood_in, None)
            rest = {key: value for key, value in raw.items() if key != "axonn" and key not in _BATCH}
            config_hook.step_aside()
            try:
                DeepSpeedConfig({**rest, "train_batch_size": 1})
            except Exception as error:  # what DeepSpeed raises on a value that it cannot use is of many kinds
                raise ConfigError(f"DeepSpeed refuses it: {_words(error)}") from None
            check_optimizer(
                raw.get("optimizer") or {}, states_config.owner(block, as_understood(raw), None) is not None
            )
            _check_schedule(raw.get("scheduler"))
    finally:
        os.environ.pop("WORLD_SIZE", None) if before is None else os.environ.update(WORLD_SIZE=before)
    keys = ", ".join(sorted(_keys(block))) or "none"
    grid = None if open_sizes else getattr(unit, "grid", None)
    lines = [f"keys that are on: {keys}"]
    if grid is not None:
        lines += [_drawn(grid), f"{grid.readers} of {grid.world} ranks read different data"]
    elif open_sizes:
        lines.append('the grid: sizes that are "auto" are chosen when the engine starts and knows the model')
    if filled_in:
        lines.append(f"a step: the HF Trainer fills in {', '.join(filled_in)}")
    elif block.pipeline is not None:
        lines.append("a step: as many ranks read different data as the PipelineModule's number of stages leaves")
    else:
        if grid is None and not open_sizes and not (raw.get("elasticity") or {}).get("enabled"):
            batch.check(raw, 1, ranks)
        lines += _batches(raw, ranks if grid is None else grid.readers, open_sizes)
    return lines, grid, block


def _stand_in(raw: Mapping[str, Any], ranks: int, open_sizes: bool) -> dict[str, Any]:
    """A batch that any grid takes, where the configuration has none yet."""
    if raw.get(_BATCH[0]) is not None or raw.get(_BATCH[1]) is not None and not open_sizes:
        return {}
    return {_BATCH[0]: ranks, _BATCH[1]: None, _BATCH[2]: None} if open_sizes else {_BATCH[1]: 1}


def _check_schedule(given: Any) -> None:
    """Refuse a schedule that there is not, which DeepSpeed sees when the engine starts."""
    from deepspeed.runtime import lr_schedules
    from torch.optim import lr_scheduler

    name = (given or {}).get("type")
    if name is None:
        return
    kind = getattr(lr_schedules, name, None) or getattr(lr_scheduler, name, None)
    if not inspect.isclass(kind):
        near = difflib.get_close_matches(name, lr_schedules.VALID_LR_SCHEDULES, n=1, cutoff=0.0)[0]
        raise ConfigError(f'scheduler.type = "{name}" is none of DeepSpeed\'s and torch\'s; the nearest is "{near}"')
    try:
        inspect.signature(kind).bind_partial(None, **(given.get("params") or {}))
    except TypeError as error:
        raise ConfigError(f"scheduler.params of {name}: {error}; correct them") from None


def _words(error: Exception) -> str:
    """A refusal of DeepSpeed's in a line: of its models the first key that is wrong."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return f"{where or 'a value'} = {json.dumps(first['input'], default=str)}: {first['msg']}; correct it"
    return " ".join(str(error).split()) or type(error).__name__


def _batches(raw: Mapping[str, Any], readers: int, open_sizes: bool) -> Iterator[str]:
    total, micro, steps = (raw.get(key) for key in _BATCH)
    if open_sizes or (total is None and micro is None):
        return
    micro = micro or max(int(total or 0) // (readers * (steps or 1)), 1)
    steps = steps or (max(int(total) // (micro * readers), 1) if total else 1)
    yield f"a step: {micro * steps * readers} samples, {micro} a reader at a time, {steps} micro-batches"


def _drawn(grid: Any) -> str:
    """The grid as text; of many ranks its sizes alone."""
    if grid.world <= _DRAWN:
        return grid.draw()
    return f"{grid.world} ranks, gx={grid.gx} gy={grid.gy} gz={grid.gz} gdata={grid.gdata}"


def _keys(block: Any) -> set[str]:
    on = {key for key in type(block).model_fields if getattr(block, key) not in (None, False)}
    return (on - {"requires"}) | set(block.others)


def layers(block: Any, raw: Mapping[str, Any], grid: Any, model: str, ranks: int) -> Iterator[str]:
    """Lines on a model under the configuration: the plan of its layers, and the bytes of weights, gradients and states on a rank."""
    if block.tensor_parallel is not None and grid is None:
        yield 'the plan and memory of a rank follow from the grid, whose sizes are "auto"; write gx, gy and gz as numbers to see them'
        return
    import torch

    from axonn_plugins.samo.models import maker
    from axonn_tp import Grid, auto_plan, place
    from axonn_tp.plan.volumes import local_parameters

    with torch.device("meta"):
        made = maker(model)()
    whole = sum(parameter.numel() for parameter in made.parameters())
    held, on = whole, grid or Grid(gdata=ranks)
    if block.tensor_parallel is not None:
        from axonn_plugins.hosts.common.tensor_parallel import layer_plans, options

        plan, report = layer_plans(block.tensor_parallel), None
        if block.tensor_parallel.plan == "auto":
            plan, report = auto_plan(made, grid)
        held = local_parameters(made, place(made, grid, plan, options(block.tensor_parallel)), grid)
        if report is not None:
            yield str(report)
    from axonn_plugins.hosts.deepspeed.spellings import as_understood
    from axonn_plugins.hosts.deepspeed.tensor.auto_sizes import state_bytes

    size = state_bytes(as_understood(raw), on)
    yield (
        f"a rank holds {held:,} of {whole:,} parameters ({held / whole:.1%}); weights, gradients and Adam's states "
        f"{size * held / 2**30:.2f} GiB, {size:.3g} bytes a parameter; activations come on top"
    )
    if block.samo is not None or block.ted is not None or block.offload_optimizer is not None:
        yield "axonn.samo, ted and offload_optimizer take less than that: axonn samo memory, axonn ted memory"


class _quietly:
    """Keeps what DeepSpeed prints when it is imported off stdout, and lets it start without a GPU."""

    def __enter__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        self._redirected = redirect_stdout(sys.stderr)
        self._redirected.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._redirected.__exit__(*error)
