"""Settings of a cluster: its number of nodes, latency, bandwidth and name, read strictly."""

from __future__ import annotations

import re
from fractions import Fraction

from axonn_plugins.config import ConfigError

MAX_NODES = 64

_NANOSECONDS = {"us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_BITS = {"kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9}
_LONGEST = "10s"
_SLOWEST, _FASTEST = "10kbit", "400Gbit"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")


def nanoseconds(latency: str) -> int:
    """A one-way latency such as ``0.5ms`` in nanoseconds.

    Raises:
        ConfigError: not a number with us, ms or s, or above 10 s.
    """
    found = _quantity(latency, _NANOSECONDS)
    if found is None or found > _NANOSECONDS["s"] * 10:
        raise ConfigError(
            f"latency = {latency!r} is not a time of at most {_LONGEST}; write a number and us, ms or s, such as 0.5ms"
        )
    return int(found)


def bits_per_second(bandwidth: str | None) -> int:
    """A bandwidth such as ``500Mbit`` (a second, in each direction) in bits a second; 0 for None, which is no limit.

    Raises:
        ConfigError: not a number with kbit, Mbit or Gbit, or out of range.
    """
    if bandwidth is None:
        return 0
    found = _quantity(bandwidth, _BITS)
    if found is None or not 10 * _BITS["kbit"] <= found <= 400 * _BITS["Gbit"]:
        raise ConfigError(
            f"bandwidth = {bandwidth!r} is not a bandwidth from {_SLOWEST} to {_FASTEST}; write a number and kbit, Mbit "
            "or Gbit, such as 500Mbit, or leave it out for no limit"
        )
    return int(found)


def node_count(nodes: int) -> int:
    """The number of nodes, checked.

    Raises:
        ConfigError: not 1 to 64.
    """
    if isinstance(nodes, bool) or not isinstance(nodes, int) or not 1 <= nodes <= MAX_NODES:
        raise ConfigError(f"nodes = {nodes!r} is not an integer from 1 to {MAX_NODES}; choose one that is")
    return nodes


def cluster_name(name: str) -> str:
    """A cluster's name, checked.

    Raises:
        ConfigError: it is empty, too long or has other characters than letters, digits and ``_.-``.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name = {name!r} is not a name; use up to 32 letters, digits, and _ . - after the first")
    return name


def shown(latency: int, bandwidth: int) -> str:
    """Latency in nanoseconds and bandwidth in bits a second as text, in the units they are read in."""
    unit = next((u for u in ("s", "ms") if latency >= _NANOSECONDS[u]), "us")
    text = f"latency {latency / _NANOSECONDS[unit]:g}{unit}, "
    if not bandwidth:
        return text + "unlimited bandwidth"
    unit = next((u for u in ("Gbit", "Mbit") if bandwidth >= _BITS[u]), "kbit")
    return text + f"bandwidth {bandwidth / _BITS[unit]:g}{unit}"


def _quantity(text: str, units: dict[str, int]) -> Fraction | None:
    match = re.fullmatch(rf"(\d{{1,12}}(?:\.\d{{1,12}})?)({'|'.join(units)})", text) if isinstance(text, str) else None
    return Fraction(match[1]) * units[match[2]] if match else None
