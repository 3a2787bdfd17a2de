"""``axonn layers``: what the automatic plan makes of a model's layers on a grid, without a GPU and without weights."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from typing import Annotated

import torch
from tyro import conf

from axonn_plugins.cli.options import read
from axonn_plugins.config.base import ConfigError
from axonn_plugins.observe.clock import elapsed
from axonn_plugins.samo.models import maker
from axonn_tp import Grid, auto_plan


@dataclass(frozen=True, kw_only=True)
class Options:
    """The layers of a model under plan = "auto" on a grid, the bytes that each sends, and why; takes seconds, one core and no weights.

    Attributes:
        gx: ranks that split the output features of a pair's first layers.
        gy: ranks that split their input features.
        gz: ranks that share out weights.
        gdata: ranks that each train samples of their own on all of the above.
        every_block: simulate each block, also those that are alike; the plan is the same.
    """

    model: Annotated[conf.Positional[str], conf.arg(metavar="MODEL", help="the path of HF's config.json")]
    gx: int = 1
    gy: int = 1
    gz: int = 1
    gdata: int = 1
    every_block: bool = False


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    parsed = read(Options, arguments, "axonn layers")
    for axis in ("gx", "gy", "gz", "gdata"):
        if getattr(parsed, axis) < 1:
            raise ConfigError(f"--{axis} = {getattr(parsed, axis)} is not a number of ranks; use 1 or more")
    with torch.device("meta"):
        model = maker(parsed.model)()
    torch.set_num_threads(1)
    began = time.process_time()
    grid = Grid(parsed.gx, parsed.gy, parsed.gz, parsed.gdata)
    with elapsed("finding the plan"):
        _, report = auto_plan(model, grid, reuse=not parsed.every_block)
    took, unit = time.process_time() - began, 1 if sys.platform == "darwin" else 1024
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    print(f"{report}\nFound in {took:.1f} s of one core; at most {held / 2**30:.1f} GiB of memory.")
    return 0
