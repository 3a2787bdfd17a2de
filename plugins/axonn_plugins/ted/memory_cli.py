"""``axonn ted memory``: the largest MoE that fits, by number of GPUs (Figure 7.9), or with MODEL the bytes of one configuration."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro import conf

from axonn_plugins.cli.options import read
from axonn_plugins.config import ConfigError
from axonn_plugins.ted import memory_report as report
from ted_moe.memory import TABLE_4_1, Degrees, Transformer, require_divides

_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SUMMIT_NODE = 6
_ONE, _MANY = ("expert", "data", "tokens"), ("gpus", "reserve", "picture")
"""Options of one configuration, and of the table."""


_GPT = "GPT:layers,hidden,vocabulary[,context]"


@dataclass(frozen=True, kw_only=True)
class Options:
    # Everything is read as text, so that what is wrong with it is said in our words.
    """The largest MoE that fits, by number of GPUs (Figure 7.9), or with MODEL the bytes of one configuration.

    Attributes:
        memory: of a GPU; in the table 16GB, Summit's V100, if not given.
        experts: in every second layer: 16, or for the table 4,8,16 or 4..128, its default.
        tensor: tensor degree, 1 if not given; in the table the highest allowed, or "max", 6 if not given, a node of Summit.
        measure: train stock DeepSpeed-MoE for a step on this machine and count: MODEL, or for the table a small GPT.
        gpus: of the table: numbers of GPUs, 32,64,128,256,512 if not given.
        reserve: of the table: kept free on each GPU for activations and workspace, 0GB if not given.
        picture: of the table: a file to draw Figure 7.9 into.
        expert: of MODEL: expert-parallel ranks; one for each expert if not given.
        data: of MODEL: replicas of an expert, 1 if not given; GPUs are tensor × expert × data, equation 7.1.
        tokens: of MODEL: of a microbatch, for activations; the model's context if not given.
    """

    model: Annotated[
        conf.Positional[str | None],
        conf.arg(metavar="[MODEL]", help=f"{', '.join(TABLE_4_1)} or {_GPT}: the base model"),
    ] = None
    memory: str | None = None
    experts: str | None = None
    tensor: str | None = None
    measure: bool = False
    gpus: str | None = None
    reserve: str | None = None
    picture: str | None = None
    expert: str | None = None
    data: str | None = None
    tokens: str | None = None


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    parsed = read(Options, arguments, "axonn ted memory")
    misplaced = [name for name in (_ONE if parsed.model is None else _MANY) if getattr(parsed, name) is not None]
    if misplaced:
        what = "belongs to one MODEL" if parsed.model is None else "is for the table, which is printed without MODEL"
        raise ConfigError(f"--{misplaced[0]} = {getattr(parsed, misplaced[0])} {what}; leave one of the two out")
    return _table(parsed) if parsed.model is None else _one(parsed)


def _table(parsed: Options) -> int:
    gpus = _numbers("gpus", "32,64,128,256,512" if parsed.gpus is None else parsed.gpus)
    experts = _numbers("experts", "4..128" if parsed.experts is None else parsed.experts)
    tensor = max(gpus) if parsed.tensor == "max" else _number("tensor", parsed.tensor, _SUMMIT_NODE, 'or "max"')
    memory = _size("memory", "16GB" if parsed.memory is None else parsed.memory)
    reserve = _size("reserve", "0GB" if parsed.reserve is None else parsed.reserve)
    if memory <= reserve:
        raise ConfigError(
            f"--memory = {parsed.memory or '16GB'} leaves nothing beside --reserve = {parsed.reserve or '0GB'}; give more memory"
        )
    rows = report.search(gpus, experts, memory - reserve, tensor)
    print(report.table(rows, experts, memory, reserve, tensor))
    if parsed.picture is not None:
        for file in report.picture(rows).save(Path(parsed.picture), "--picture"):
            print(f"\npicture: {file}")
    if parsed.measure:
        from axonn_plugins.ted import memory_measure as measure

        print(f"\n{measure.compare(measure.SMALL, measure.SMALL_EXPERTS, measure.SMALL_DEGREES)}")
    return 0


def _one(parsed: Options) -> int:
    assert parsed.model is not None
    model = base(parsed.model)
    experts = _number("experts", parsed.experts, 16)
    degrees = Degrees(
        _number("tensor", parsed.tensor, 1),
        _number("expert", parsed.expert, experts),
        _number("data", parsed.data, 1),
    )
    try:
        require_divides(model, experts, degrees)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None
    memory = None if parsed.memory is None else _size("memory", parsed.memory)
    tokens = _number("tokens", parsed.tokens, model.context)
    if parsed.measure:
        from axonn_plugins.ted import memory_measure as measure

        measure.require_small(model, experts, degrees)
    print(report.configuration(parsed.model, model, experts, degrees, tokens, memory))
    if parsed.measure:
        print(f"\n{measure.compare(model, experts, degrees)}")
    return 0


def base(name: str) -> Transformer:
    """The base model of this name: one of Table 4.1, or ``GPT:layers,hidden,vocabulary[,context]``.

    Raises:
        ConfigError: there is no such model.
    """
    plain = {_plain(known): known for known in TABLE_4_1}
    if _plain(name) in plain:
        return TABLE_4_1[plain[_plain(name)]]
    if not name.lower().startswith("gpt:"):
        near = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f'MODEL = "{name}" is not known; use "{plain[near]}", another of {", ".join(TABLE_4_1)}, or {_GPT}'
        )
    sizes = name.partition(":")[2].split(",")
    if len(sizes) not in (3, 4) or not all(_is_count(size) for size in sizes):
        raise ConfigError(
            f'MODEL = "{name}" does not give the sizes of a GPT; write {_GPT} in whole numbers from 1 to 999,999,999, such as GPT:24,2048,50257'
        )
    if int(sizes[0]) < 2:
        raise ConfigError(f'MODEL = "{name}" has no second layer to hold experts; use 2 layers or more')
    return Transformer(*(int(size) for size in sizes))


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower()


def _is_count(text: str) -> bool:
    return re.fullmatch(r"\s*[0-9]{1,9}\s*", text) is not None and int(text) > 0


def _number(key: str, text: str | None, default: int, more: str = "") -> int:
    if text is None:
        return default
    if not _is_count(text):
        raise ConfigError(
            f'--{key} = "{text}" is not a number of them; use a whole number from 1 to 999,999,999 {more}'.rstrip()
        )
    return int(text)


def _numbers(key: str, text: str) -> list[int]:
    """``4,8,12``, and ``4..128`` for 4, 8, 16, ..., 128."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        if not _is_count(first) or (dots and (not _is_count(last) or int(last) < int(first))):
            raise ConfigError(
                f'--{key} = "{text}" is not a list of numbers; use whole numbers from 1 to 999,999,999, such as 32,64, or 4..128, '
                "which doubles from 4 to 128"
            )
        number = int(first)
        while number <= int(last if dots else first):
            numbers.add(number)
            number *= 2
    return sorted(numbers)


def _size(key: str, text: str) -> float:
    found = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([KMGT]i?B)\s*", text)
    if found is None or (key == "memory" and float(found[1]) == 0):
        raise ConfigError(
            f'--{key} = "{text}" is not a size of memory; use a positive number and a unit, such as 16GB or 40GiB'
        )
    return float(found[1]) * _UNITS[found[2]]
