"""``axonn convert``: weights from one format into another."""

from __future__ import annotations

import ctypes
import re
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro import conf

from axonn_plugins.cli.options import read
from axonn_plugins.config.base import ConfigError
from axonn_plugins.weights.convert import convert

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
Format = Literal["hf", "litgpt", "megatron", "axonn", "deepspeed"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write a model's weights in another format, a tensor at a time, with its configuration and tokenizer beside them.

    Attributes:
        to: hf: safetensors for from_pretrained; litgpt: lit_model.pth; megatron: torch_dist for --load; axonn: a checkpoint of any grid;
            deepspeed: a checkpoint of a grid, with the optimizer's states, for the same script without the block.
        shard_size: with --to hf: no safetensors file is larger, such as 500MB or 2GiB, unless it holds one tensor; 5GB by default.
        config: a folder with the model's config.json, or LitGPT's model_config.yaml, where SOURCE has none; not with --to deepspeed.
        ranks: with --to deepspeed: of the run that goes on, 1 by default.
        zero: with --to deepspeed: its stage of ZeRO, 1 by default; at 0 any number of ranks goes on.
    """

    source: Annotated[
        conf.Positional[Path],
        conf.arg(metavar="SOURCE", help="an HF, LitGPT or Megatron folder, or a checkpoint of ours"),
    ]
    target: Annotated[conf.Positional[Path], conf.arg(metavar="TARGET", help="a folder that is not there yet")]
    to: Format
    shard_size: str | None = None
    config: Path | None = None
    ranks: int | None = None
    zero: Literal[0, 1, 2] | None = None


_OF: dict[str, tuple[Format, ...]] = {
    "shard_size": ("hf",),
    "config": ("hf", "litgpt", "megatron", "axonn"),
    "ranks": ("deepspeed",),
    "zero": ("deepspeed",),
}
"""The formats that read an option which not all do."""


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    options = read(Options, arguments, "axonn convert")
    for name, formats in _OF.items():
        given = getattr(options, name)
        if given is not None and options.to not in formats:
            flag, for_ = name.replace("_", "-"), " or ".join(f"--to {each}" for each in formats)
            raise ConfigError(f"--{flag} = {given} is for {for_}, and this is --to {options.to}; leave it out")
    size = _bytes("5GB" if options.shard_size is None else options.shard_size)
    _give_memory_back()
    if options.to == "deepspeed":
        ranks = 1 if options.ranks is None else options.ranks
        if ranks < 1:
            raise ConfigError(f"--ranks = {ranks} is no number of ranks; write how many the run has that goes on")
        from axonn_plugins.hosts.deepspeed.checkpoint.to_stock import to_stock

        print(to_stock(options.source, options.target, ranks, 1 if options.zero is None else options.zero))
        return 0
    done = convert(options.source, options.target, options.to, size, options.config)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"{done}; at most {held / 2**30:.2f} GiB of memory")
    return 0


def _give_memory_back() -> None:
    """Have glibc return what tensors leave behind, which it would keep in pieces between others."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMG]I?|)B?", text.strip().upper())
    size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if size < 1:
        raise ConfigError(f'--shard-size = "{text}" is not a size; write one such as 500MB or 2GiB')
    return size
