"""Machines and models as TOML or JSON files, read strictly: ours beside this module, or the user's by path."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import sys
from collections.abc import Collection, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from axonn_plugins.config.base import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
UNITS: dict[str, dict[str, float]] = {
    "memory": {f"{prefix}B": size for prefix, size in (_PREFIXES | _BINARY).items()},
    "bandwidth": {f"{prefix}B/s": size for prefix, size in (_PREFIXES | _BINARY).items()}
    | {f"{prefix}bit/s": size / 8 for prefix, size in _PREFIXES.items()},
    "rate": {f"{prefix}FLOP/s": size for prefix, size in _PREFIXES.items()},
    "time": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
}
"""Units by kind of quantity: bytes, bytes a second, floating-point operations a second, seconds."""
_EXAMPLES = {"memory": "80 GB", "bandwidth": "25 GB/s", "rate": "312 TFLOP/s", "time": "5 us"}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]+)\s*")


def quantity(kind: str, where: str, value: Any, zero: bool = False) -> float:
    """A number with its unit, such as ``25 GB/s``, in bytes, seconds or operations.

    Args:
        kind: a key of `UNITS`.
        where: the file and key, for the error.
        value: what stands there.
        zero: whether it may be 0.

    Raises:
        ConfigError: it has no unit, another kind's, or is not positive and finite.
    """
    found = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    size = math.nan if found is None or found[2] not in UNITS[kind] else float(found[1]) * UNITS[kind][found[2]]
    if not (math.isfinite(size) and (size > 0 or (zero and size == 0))):
        raise ConfigError(
            f"{where} = {value!r} is not a {kind}; write a {'' if zero else 'positive '}number and a unit, such as {_EXAMPLES[kind]!r}"
        )
    return size


def whole(where: str, value: Any, least: int = 1, most: int = 10**9) -> int:
    """A whole number.

    Raises:
        ConfigError: it is none, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{where} = {value!r} is not a whole number from {least:,} to {most:,}; write one that is")
    return value


def truth(where: str, value: Any) -> bool:
    """True or false.

    Raises:
        ConfigError: it is neither.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{where} = {value!r} is not true or false; write one of the two")
    return value


def wholes(where: str, value: Any, least: int) -> tuple[int, ...]:
    """A list of whole numbers, at most 16.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, list) or len(value) > 16 or (least and not value):
        raise ConfigError(f"{where} = {value!r} is not a short list of whole numbers; write one such as [1, 2]")
    return tuple(whole(where, one, least, 2**10) for one in value)


def number(where: str, value: Any, most: float = math.inf) -> float:
    """A positive number.

    Raises:
        ConfigError: it is none, or above `most`.
    """
    good = not isinstance(value, bool) and isinstance(value, (int, float))
    if not good or not 0 < value <= min(most, sys.float_info.max):
        limit = "" if math.isinf(most) else f" and at most {most:g}"
        raise ConfigError(f"{where} = {value!r} is not a number above 0{limit}; write one that is")
    return float(value)


def text(where: str, value: Any) -> str:
    """A text that is not empty.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f'{where} = {value!r} is not a text; write one in quotes, such as "004, Table A3"')
    return value


def keys(where: str, table: Mapping[str, Any], required: Collection[str], optional: Collection[str]) -> None:
    """Refuse keys that are unknown, and tables that lack one.

    Raises:
        ConfigError: the first such key, and its nearest.
    """
    known = [*required, *optional]
    for key in table:
        if key not in known:
            near = nearest(key, known)
            raise ConfigError(f'{where} has an unknown key "{key}"; use "{near}", or another of {", ".join(known)}')
    missing = [key for key in required if key not in table]
    if missing:
        raise ConfigError(f'{where} lacks the key "{missing[0]}"; it needs {", ".join(required)}')


def nearest(name: str, known: Collection[str]) -> str:
    """The known name that is most like this one."""
    return difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.0)[0]


def is_path(name: str) -> bool:
    """True if a name is meant as a file's."""
    return name.endswith((".toml", ".json")) or "/" in name or "\\" in name


def read(option: str, path: Path) -> dict[str, Any]:
    """The tables of a TOML or JSON file.

    Args:
        option: what named the file, for the error.
        path: the file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f'{option} = "{path}" cannot be read: {reason}; give a TOML or JSON file') from None
    try:
        loaded = json.loads(content) if path.suffix == ".json" else tomllib.loads(content)
    except (ValueError, RecursionError) as error:  # also of an integer with more digits than Python reads
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f'{option} = "{path}" is not {kind}: {error}; mend it') from None
    if not isinstance(loaded, dict):
        raise ConfigError(f'{option} = "{path}" holds no keys with values; write some, such as name = "mine"')
    return loaded


def ours(folder: str) -> dict[str, Path]:
    """Our files of a folder beside this module, by name without the suffix."""
    found = (Path(str(file)) for file in files("axonn_plugins.planner").joinpath(folder).iterdir())
    return {path.stem: path for path in sorted(found) if path.suffix == ".toml"}


def writable(option: str, name: str) -> None:
    """See that a file can be written, before what goes into it is computed.

    Raises:
        ConfigError: it cannot.
    """
    path = Path(name)
    able = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(able, os.W_OK):
        raise ConfigError(
            f'--{option} = "{name}" cannot be written; give a file in a folder that exists and may be written to'
        )
