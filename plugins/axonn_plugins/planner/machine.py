"""Machines: what one GPU computes and holds, and the two networks between GPUs. `load` reads one by name or path."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from axonn_plugins.caches import cache_folder
from axonn_plugins.config.base import ConfigError
from axonn_plugins.planner import files
from axonn_plugins.planner.calibration import Calibration, as_measured, ours
from axonn_plugins.planner.work import Number


@dataclass(frozen=True)
class Machine:
    """A machine. Rates are in flop/s and bytes/s, sizes in bytes, times in seconds; networks' rates are of one direction.

    Attributes:
        name: what a user calls it.
        source: where the numbers come from.
        tensor: peak of matrix multiplication in 16 bits, of one GPU.
        vector: peak of everything else in 16 bits.
        memory: of one GPU.
        memory_bandwidth: between a GPU and its memory.
        domain: GPUs that the fast network joins: a node, or an NVSwitch domain.
        fast_bandwidth: of a GPU to others of its domain.
        fast_latency: of a message there.
        slow_bandwidth: of one network interface, between domains.
        slow_latency: of a message there.
        interfaces: network interfaces for each GPU.
        host: GPUs of one host, where a domain joins several; 0 for as many as a domain has.
        device: what a rank computes on.
        sustained: the peak that a large matrix multiplication reaches, where it was measured.
        product_half: flop of a matrix multiplication that reaches half of `sustained`, where it was measured.
        attention: operations a second that fused attention reaches in forward, causal ones counted as done, where it was measured; else as fitted.
        fp8: peak of matrix multiplication in 8 bits; None where there is none.
        bf16: whether its 16 bits may be bf16; else fp16, whose losses are scaled.
        host_bandwidth: between a GPU and its host's memory; 25 GB/s of PCIe 4 by default.
        flop_latency: seconds that an operation takes before it computes.
        flop_efficiency: share of both peaks that is reached.
        bandwidth_efficiency: share of both networks' bandwidths that is reached.
        assumed: what no source gives.
        within: measured bandwidths of rings within a domain, by (G0, G1): G0 simultaneous groups of G1 GPUs, every G0th of a domain
            in one (000, section 5.1.2, case 1). Others have `bandwidth_efficiency` of `fast_bandwidth`.
        collective_error: share by which 4D grids' collectives may miss what the formulas say, which ``axonn bench planner`` writes into
            its file as the ledger measured it; None for what was measured on Perlmutter (`uncertainty`).
        reduce_scatter: seconds of a library's reduce-scatter beside an all-gather's of the same bytes: 1 of a ring's, 2 where it is done as an
            all-reduce, as gloo does.
        call: seconds that a collective takes longer in training than by itself, where nothing runs ahead, as on CPUs.
        collectives: "native" are rings; "pccl" are PCCL's: between domains by recursive doubling, each GPU with its share, then a ring
            within (000, chapter 6).
        calibration: what training reaches of all this; None for the papers' assumptions.
    """

    name: str
    source: str
    tensor: float
    vector: float
    memory: float
    memory_bandwidth: float
    domain: int
    fast_bandwidth: float
    fast_latency: float
    slow_bandwidth: float
    slow_latency: float
    interfaces: float = 1.0
    host: int = 0
    device: Literal["cuda", "cpu"] = "cuda"
    sustained: float | None = None
    product_half: float | None = None
    attention: float | None = None
    fp8: float | None = None
    bf16: bool = True
    host_bandwidth: float = 25e9
    flop_latency: float = 20e-6
    flop_efficiency: float = 0.8
    bandwidth_efficiency: float = 0.7
    assumed: str = ""
    within: Mapping[tuple[int, int], float] = field(default_factory=dict)
    collective_error: float | None = None
    reduce_scatter: float = 1.0
    call: float = 0.0
    collectives: Literal["native", "pccl"] = "native"
    calibration: Calibration | None = None

    def domains(self, gpus: Number) -> Number:
        """Number of domains that hold so many GPUs."""
        return np.maximum(gpus / self.domain, 1)


_QUANTITIES = {
    "tensor": "rate",
    "vector": "rate",
    "memory": "memory",
    "memory_bandwidth": "bandwidth",
    "fast_bandwidth": "bandwidth",
    "fast_latency": "time",
    "slow_bandwidth": "bandwidth",
    "slow_latency": "time",
}
_OPTIONAL_QUANTITIES = {
    **{"sustained": "rate", "attention": "rate", "fp8": "rate", "host_bandwidth": "bandwidth"},
    **{"flop_latency": "time", "call": "time"},
}
_OPTIONAL = (
    "name",
    "interfaces",
    "host",
    "device",
    *_OPTIONAL_QUANTITIES,
    "flop_efficiency",
    "bandwidth_efficiency",
    "assumed",
    "within",
    "product_half",
    "collective_error",
    "reduce_scatter",
    "bf16",
)
_GROUPS = re.compile(r"([1-9][0-9]{0,3})x([1-9][0-9]{0,3})")
_HERE = "here"
_EMULATED = re.compile(r"emulated(?:-([0-9.]+[mu]?s))?(?:-([0-9.]+[kMG]bit))?")
_DOMAIN = re.compile(r"(.+)-nvs([0-9]{1,6})")


def measured_file() -> Path:
    """Where ``axonn bench network`` keeps what it measured of this machine."""
    return cache_folder() / "planner" / "measured.toml"


def names() -> list[str]:
    """The machines that we have files of; each also with ``-nvsN``, the same in domains of N GPUs."""
    return list(files.ours("machines"))


def load(name: str, option: str = "--machine") -> Machine:
    """A machine by name, or by the path of its file; either with ``-nvsN`` behind it for domains of N GPUs.

    Args:
        name: such as ``perlmutter``, ``a100-nvs4``, ``mine.toml``, ``mine.toml-nvs8``; ``here`` for what ``axonn bench network`` measured
            of this machine; ``emulated-100us-500Mbit-nvs2`` for an emulated cluster of that latency and bandwidth, with two ranks a node.
        option: what gave it, for errors.

    Raises:
        ConfigError: there is no such machine, or its file is wrong.
    """
    known = files.ours("machines")
    resized = _DOMAIN.fullmatch(name)
    base, domain = (resized[1], int(resized[2])) if resized else (name, None)
    emulated = _EMULATED.fullmatch(base)
    if emulated:
        return _emulated(f"{option} = {name!r}", emulated[1], emulated[2], domain)
    if base == _HERE:
        machine = _measured(option)
    elif base.lower() in known:
        machine = _ours(base.lower())
    elif files.is_path(base):
        machine = parse(str(base), files.read(option, Path(base)), Path(base).stem)
    else:
        raise ConfigError(
            f'{option} = "{name}" is not known; use "{_nearest(name, [*names(), _HERE])}", another of {", ".join([*names(), _HERE])}, '
            "one of these with -nvsN for domains of N GPUs, or the path of a TOML or JSON file"
        )
    if domain is None:
        return machine
    size = files.whole(f"{option} = {name!r}: the number after -nvs", domain)
    return replace(
        machine, name=f"{machine.name}-nvs{size}", domain=size, host=min(machine.host or machine.domain, size)
    )


def calibrated(machine: Machine, mode: str) -> Machine:
    """With the fitted coefficients, of GPUs, in the mode that is named for them; CPUs are as their file says that they were measured."""
    if mode != "calibrated" or machine.calibration is not None:
        return machine
    if machine.device == "cpu":
        products = machine.sustained or machine.tensor
        return replace(machine, calibration=as_measured(products, machine.vector), sustained=products)
    return replace(machine, calibration=ours())


def parse(where: str, table: dict[str, Any], name: str) -> Machine:
    """A machine from the keys of its file.

    Args:
        where: the file, for errors.
        table: its keys.
        name: the machine's, where the file does not say.

    Raises:
        ConfigError: a key is missing, unknown, or its value is wrong.
    """
    files.keys(where, table, ("source", "domain", *_QUANTITIES), _OPTIONAL)
    at = lambda key: f"{where}: {key}"  # noqa: E731
    values: dict[str, Any] = {
        key: files.quantity(kind, at(key), table[key], zero=kind == "time")
        for key, kind in (_QUANTITIES | _OPTIONAL_QUANTITIES).items()
        if key in table
    }
    for key in ("flop_efficiency", "bandwidth_efficiency"):
        if key in table:
            values[key] = files.number(at(key), table[key], most=1.0)
    for key in ("interfaces", "product_half", "collective_error", "reduce_scatter"):
        if key in table:
            values[key] = files.number(at(key), table[key])
    if "assumed" in table:
        values["assumed"] = files.text(at("assumed"), table["assumed"])
    if "host" in table:
        values["host"] = files.whole(at("host"), table["host"])
    if "device" in table:
        if table["device"] not in ("cuda", "cpu"):
            raise ConfigError(f'{at("device")} = {table["device"]!r} is not known; write "cuda" or "cpu"')
        values["device"] = table["device"]
    if "bf16" in table:
        values["bf16"] = files.truth(at("bf16"), table["bf16"])
    if "within" in table:
        values["within"] = _rings(at("within"), table["within"])
    return Machine(
        name=files.text(at("name"), table.get("name", name)),
        source=files.text(at("source"), table["source"]),
        domain=files.whole(at("domain"), table["domain"]),
        **values,
    )


def _rings(where: str, table: Any) -> dict[tuple[int, int], float]:
    """Bandwidths by "G0xG1", such as "2x2"."""
    if not isinstance(table, dict):
        raise ConfigError(f'{where} = {table!r} is not a table; write [within] and lines such as 2x2 = "150 GB/s"')
    rings = {}
    for key, value in table.items():
        groups = _GROUPS.fullmatch(key)
        if groups is None:
            raise ConfigError(f'{where} has the key "{key}", which is not groups x GPUs; write one such as 2x2')
        rings[int(groups[1]), int(groups[2])] = files.quantity("bandwidth", f"{where}.{key}", value)
    return rings


@cache
def _ours(name: str) -> Machine:
    path = files.ours("machines")[name]
    return parse(path.name, files.read("--machine", path), name)


def _measured(option: str) -> Machine:
    path = measured_file()
    if not path.is_file():
        raise ConfigError(
            f'{option} = "{_HERE}" was not measured yet; run axonn bench network --layouts 1xN, N being its ranks'
        )
    return parse(str(path), files.read(option, path), _HERE)


def _emulated(where: str, latency: str | None, bandwidth: str | None, ranks: int | None) -> Machine:
    """The emulated cluster: a node has one interface, whatever its ranks."""
    base = _ours("emulated")
    size = base.domain if ranks is None else files.whole(f"{where}: the number after -nvs", ranks)
    slow, rate = base.slow_latency, base.slow_bandwidth
    if latency is not None:
        slow = files.quantity("time", f"{where}: the latency", re.sub(r"([0-9.]+)", r"\1 ", latency), zero=True)
    if bandwidth is not None:
        rate = files.quantity("bandwidth", f"{where}: the bandwidth", re.sub(r"([0-9.]+)", r"\1 ", f"{bandwidth}/s"))
    shown = "-".join(part for part in ("emulated", latency, bandwidth, ranks and f"nvs{size}") if part)
    return replace(base, name=shown, domain=size, interfaces=1 / size, slow_latency=slow, slow_bandwidth=rate)


def _nearest(name: str, known: list[str]) -> str:
    """The nearest name, with the size of the domain that was asked for."""
    found = _DOMAIN.fullmatch(name)
    return f"{files.nearest(found[1], known)}-nvs{found[2]}" if found else files.nearest(name, known)
