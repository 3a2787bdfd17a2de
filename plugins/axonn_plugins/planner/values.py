"""Values of ``axonn plan``'s options, read as text, so that what is wrong with them is said in our words."""

from __future__ import annotations

import re

from axonn_plugins.config.base import ConfigError
from axonn_plugins.planner import files

_LARGEST = {"gpus": 2**20, "batch": 2**24, "top": 1000, "interleave": 1000, "sequence": 2**24}
_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_DECIMAL = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
# Sizes of --fix: of 1D, 2D and SUMMA, of 1D alone, and of 4D grids.
PIPELINED = ("n1", "n2", "np", "nd", "bm", "panels", "v1", "v2", "vp", "vd")
OF_1D = ("n1", "np", "nd", "bm", "v1", "vp", "vd")
GRID = ("gx", "gy", "gz", "gdata", "sequence", "stages", "m")


def sparsity(text: str | None) -> float:
    """Share that is pruned, of ``--samo``."""
    if text is None:
        return 0.0
    if not re.fullmatch(r"0?\.[0-9]{1,9}|0", text):
        raise ConfigError(f'--samo = "{text}" is not a share below 1; write how much is pruned, such as 0.9')
    return float(text)


def experts(text: str | None) -> int:
    """Number of experts that ``--ted`` asks for."""
    if text is None:
        return 0
    found = re.fullmatch(r"experts=([0-9]{1,6})", text)
    if found is None or int(found[1]) < 1:
        raise ConfigError(f'--ted = "{text}" does not say how many experts there are; write experts=16')
    return int(found[1])


def samples(text: str, sequence: int) -> int:
    """Samples of so many positions, of ``--tokens-per-batch``."""
    found = re.fullmatch(r"([0-9]{1,12})([KMG]?)", text)
    positions = int(found[1]) * _BINARY[found[2]] if found else 0
    if not positions:
        raise ConfigError(
            f'--tokens-per-batch = "{text}" is not a number of positions; write a whole number, with K, M or G for '
            "powers of 1024 if you like, such as 2M"
        )
    if positions % sequence:
        near = max(round(positions / sequence), 1)
        raise ConfigError(
            f'--tokens-per-batch = "{text}" is not a multiple of the {sequence} positions of a sample; '
            f"use {near * sequence}, which is --batch {near}"
        )
    return number("batch", str(positions // sequence))


def positions(text: str) -> int:
    """Positions of a sample, the value of ``--sequence``: a number, with K or M for powers of 1024, as in 128K."""
    found = re.fullmatch(r"([0-9]{1,8})([KM]?)", text.strip())
    count, most = int(found[1]) * _BINARY[found[2]] if found else 0, _LARGEST["sequence"]
    if not 1 <= count <= most:
        raise ConfigError(
            f'--sequence = "{text}" is not a number of positions up to {most:,}; write a whole number, with K or M for powers of 1024 if '
            "you like, such as 128K"
        )
    return count


def gpus(text: str) -> list[int]:
    """``512,1024``, and ``512..4096`` for 512, 1024, 2048, 4096."""
    counts: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        count, most = number("gpus", first), number("gpus", last if dots else first)
        if most < count:
            raise ConfigError(
                f'--gpus = "{text}" ends before it begins; write the smaller number first, such as 512..4096'
            )
        while count <= most:
            counts.append(count)
            count *= 2
    return counts


def fixed(text: str | None) -> dict[str, int]:
    """Sizes that are given, of ``--fix``."""
    sizes: dict[str, int] = {}
    for part in [] if text is None else text.split(","):
        key, _, value = part.strip().partition("=")
        _check_known("fix", key, PIPELINED + GRID)
        if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < 1:
            raise ConfigError(f'--fix = "{text}" gives {key} no size; write a whole number from 1, such as {key}=4')
        if key in sizes:
            raise ConfigError(f'--fix = "{text}" gives {key} twice; give it once')
        sizes[key] = int(value)
    return sizes


def number(option: str, text: str) -> int:
    """A whole number within what the option takes."""
    most = _LARGEST[option]
    if not re.fullmatch(r"\s*[0-9]{1,12}\s*", text) or not 1 <= int(text) <= most:
        raise ConfigError(f'--{option} = "{text}" is not a whole number from 1 to {most:,}; write one that is')
    return int(text)


def tokens(text: str) -> float:
    """Positions to train on, of ``--tokens``."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([KMBGT]?)", text)
    count = float(found[1]) * _DECIMAL[found[2]] if found else 0.0
    if not count:
        raise ConfigError(f'--tokens = "{text}" is not a number of positions; write one such as 300B or 2T')
    return count


def _check_known(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(
            f'--{option} = "{value}" is not known; use "{files.nearest(value, known)}", or another of {", ".join(known)}'
        )
