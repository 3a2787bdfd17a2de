"""The file in which measured times are kept: by node map, interface, machine and version, and by what the network is like."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from axonn_plugins import __version__
from axonn_plugins.observe.files import put
from axonn_plugins.pccl.algorithms import algorithms
from axonn_plugins.pccl.build import folder
from axonn_plugins.pccl.choice import NATIVE, Measured
from axonn_plugins.pccl.network import Network

_FORM = 2


def tuning_file() -> Path:
    """``AXONN_PCCL_TUNING`` if that is set, else tuning.json in the cache folder."""
    return Path(os.environ.get("AXONN_PCCL_TUNING") or folder() / "tuning.json")


def key_of(nodes: Sequence[Sequence[int]], interfaces: Sequence[str] | None = None) -> str:
    """Under what the times of a group with this node map are kept: groups of as many ranks on as many nodes share them."""
    shape = "+".join(str(len(node)) for node in sorted(nodes, key=len, reverse=True))
    names = ",".join(interfaces or ()) or os.environ.get("GLOO_SOCKET_IFNAME") or "default"
    version = f"version {__version__}, form {_FORM}, torch {torch.__version__}"
    return f"nodes {shape}, interface {names}, {_processor()}, {version}"


def _processor() -> str:
    with open("/proc/cpuinfo") as described:
        models = (line.partition(":")[2].strip() for line in described if line.startswith("model name"))
        return f"{os.cpu_count()} x {next(models, os.uname().machine)}"


def read(file: Path, key: str, network: Network | None) -> Measured:
    """The times under a key on such a network, None standing for a single node; none where there are none.

    Raises:
        ValueError: the file is not one of ours, or must not be read.
    """
    try:
        found = [Measured.load(json.dumps(entry["times"])) for entry in _all(file).get(key, []) if _of(entry, network)]
        for measured in found:
            _check(measured)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ValueError(f"tuning file {file} cannot be read ({error}); remove it, or name another") from error
    return found[0] if found else Measured()


def _check(measured: Measured) -> None:
    for collective, by_size in measured.times.items():
        known = algorithms(collective, 2)  # of two ranks all
        for choice, seconds in ((choice, seconds) for times in by_size.values() for choice, seconds in times.items()):
            if choice.algorithm not in known and choice.algorithm != NATIVE:
                raise ValueError(f"{collective} by {choice.algorithm!r} is unknown")
            if not 0 < seconds < math.inf:
                raise ValueError(f"{collective} by {choice} takes {seconds} s")


def write(file: Path, key: str, network: Network | None, measured: Measured) -> None:
    """Put times under a key, instead of those of such a network; readers see the file as it was, or as it then is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    known = _all(file)
    entry = {"network": network and [network.latency, network.rate], "times": json.loads(measured.dump())}
    known[key] = [entry, *(other for other in known.get(key, []) if not _of(other, network))]
    put(file, json.dumps(known, indent=1))  # readable for those who share it, as any new file is


def _of(entry: dict[str, Any], network: Network | None) -> bool:
    given = entry["network"]
    return given is network is None or (network is not None and given is not None and network.alike(Network(*given)))


def _all(file: Path) -> dict[str, list[dict[str, Any]]]:
    found = json.loads(file.read_text()) if file.exists() else {}
    if not isinstance(found, dict):
        raise ValueError("it does not hold a table")
    return found
