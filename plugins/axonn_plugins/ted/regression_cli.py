"""``axonn test ted``: TED beside stock DeepSpeed-MoE with the same weights, data and seeds; a line for each case, exit code 1 if one differs.

By itself it starts ranks on this machine; under torchrun or the deepspeed launcher it runs on the ranks that are there.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from tyro import conf

from axonn_plugins.cli.options import read
from axonn_plugins.cluster.launch import launch
from axonn_plugins.config import ConfigError

_PATIENCE = timedelta(minutes=3)
"""After which a rank that waits for the others gives up."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """TED beside stock DeepSpeed-MoE with the same weights, data and seeds; exit code 1 if a case differs.

    By itself it starts ranks on this machine; under torchrun or the deepspeed launcher it runs on the ranks that are there.

    Attributes:
        ranks: started on this machine, 8 if not given; not with a launcher.
        device: cpu (gloo) or cuda (NCCL).
        dtype: of weights and data; gates are in float32.
        filter: only cases with it in their names, such as "expert 4" or training; may be repeated.
    """

    ranks: str | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    filter: conf.UseAppendAction[tuple[str, ...]] = ()


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    try:
        return _main(arguments)
    except ConfigError:
        if os.environ.get("RANK", "0") != "0":
            return 2  # the first rank says it for all
        raise


def _main(arguments: list[str]) -> int:
    parsed = read(Options, arguments, "axonn test ted")
    started = "WORLD_SIZE" in os.environ
    ranks = _ranks(parsed.ranks, started)
    os.environ["DS_ACCELERATOR"] = parsed.device
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch

    if parsed.device == "cuda":
        here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE", "1")) if started else ranks
        if torch.cuda.device_count() < here:
            raise ConfigError(
                f"--device = cuda needs a GPU for each of {here} ranks, and this machine has {torch.cuda.device_count()}; "
                "give fewer --ranks, or --device cpu"
            )
    _quieten()
    from axonn_plugins.ted import regression

    dtype = getattr(torch, parsed.dtype)
    words = parsed.filter
    names = [case.name for case in regression.cases(ranks, dtype, parsed.device)]
    if not any(_wanted(name, words) for name in names):
        what = '" and "'.join(words)
        raise ConfigError(f'--filter = "{what}" is in no case, such as "{names[0]}"; leave it out to see all')
    if started:
        return _run(ranks, parsed.device, parsed.dtype, words)
    return launch(_run, ranks, ranks, parsed.device, parsed.dtype, words)[0]


def _ranks(asked: str | None, started: bool) -> int:
    if asked is not None and not (asked.isdecimal() and 1 <= int(asked)):
        raise ConfigError(f"--ranks = {asked} is not a number of ranks; use 1 or more, such as 8")
    if not started:
        return int(asked or 8)
    there = int(os.environ["WORLD_SIZE"])
    if asked is not None and int(asked) != there:
        raise ConfigError(f"--ranks = {asked}, but the launcher started {there}; leave --ranks out")
    return there


def _wanted(name: str, words: Sequence[str]) -> bool:
    return all(word in name for word in words)


def _quieten() -> None:
    """Keep other packages' output off the terminal, and leave out what would be compiled without need."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def _run(ranks: int, device: str, dtype: str, words: Sequence[str]) -> int:
    """Every rank's part; the first prints."""
    import torch
    import torch.distributed as dist

    import axonn_plugins
    from axonn_plugins.ted import regression

    axonn_plugins.activate()
    screen = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)  # DeepSpeed prints
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_PATIENCE)

    def say(line: str) -> None:
        if dist.get_rank() == 0:
            print(line, file=screen, flush=True)

    cases = [case for case in regression.cases(ranks, getattr(torch, dtype), device) if _wanted(case.name, words)]
    width = max(len(case.name) for case in cases)
    say(f"{'case':<{width}}  largest difference, relative   bar")
    started, found = time.monotonic(), []
    for case in cases:
        value, what = case.measure()
        failed = not value <= case.bar
        found.append((value / case.bar, failed, value, case.name))
        say(f"{case.name:<{width}}  {value:.1e} {what:<32} {case.bar:.0e}  {'DIFFERS' if failed else 'ok'}")
    count, worst = sum(failed for _, failed, _, _ in found), max(found)
    verdict = f"{count} of {len(cases)} cases differ from" if count else f"all {len(cases)} cases equal"
    say(
        f"axonn test ted: {verdict} stock DeepSpeed-MoE on {ranks} ranks ({device}, {dtype}), in {time.monotonic() - started:.0f} s; "
        f"the largest difference for its bar is {worst[2]:.1e}, of {worst[3]}."
    )
    dist.barrier()
    dist.destroy_process_group()
    return 1 if count else 0
