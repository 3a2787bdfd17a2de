"""Measured times of matmuls on disk: one file for each device and library version, replaced as a whole."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

Times = dict[str, dict[str, float]]

_LOCK_SECONDS = 10.0
_NAME = re.compile(r"\d+x\d+x\d+ \w+ ([NT][NT])")


@dataclass(frozen=True)
class Machine:
    """The conditions under which measured times hold: the device, torch's version, the library behind its matmul, and settings that change it."""

    device: str
    version: str
    library: str
    threads: int
    precision: str

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        """This machine."""
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            library = f"hip {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"
            threads = 0
        else:
            name = f"{_processor()} {torch.backends.cpu.get_cpu_capability()}"
            found = re.search(
                r"(oneAPI )?Math Kernel Library Version [^ ]+|OpenBLAS|BLAS_INFO=\w+", torch.__config__.show()
            )
            library = found.group(0) if found else "unknown"
            threads = torch.get_num_threads()
        return cls(name, torch.__version__, library, threads, torch.get_float32_matmul_precision())

    def file(self, folder: Path) -> Path:
        """Where its times are kept."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]
        return folder / f"matmuls-{digest}.json"


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1) if found else platform.machine()


def default_cache() -> Path:
    """The user's cache folder: ``$XDG_CACHE_HOME/axonn``, or ``~/.cache/axonn``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "axonn"


def read_times(folder: Path, machine: Machine) -> Times:
    """Seconds by mode, by product; nothing, and a warning, where the file is not what `write_times` wrote here."""
    path = machine.file(folder)
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        return _ignore(path, str(error))
    if not isinstance(content, dict) or content.get("machine") != asdict(machine):
        return _ignore(path, "it was measured on another machine")
    products = content.get("products")
    if not isinstance(products, dict) or not all(_is_measured(name, times) for name, times in products.items()):
        return _ignore(path, "its entries are not times of matmuls")
    return products


def _is_measured(name: str, times: Any) -> bool:
    match = _NAME.fullmatch(name)
    return (
        match is not None
        and isinstance(times, dict)
        and set(times) == {"NN", "NT", "TN", match.group(1)}
        and all(isinstance(t, float) and t > 0 for t in times.values())
        and math.isfinite(times[match.group(1)])
    )


def _ignore(path: Path, reason: str) -> Times:
    warnings.warn(f"{path} is ignored and matmuls are timed again: {reason}", stacklevel=3)
    return {}


def write_times(folder: Path, machine: Machine, times: Mapping[str, Mapping[str, float]]) -> None:
    """Add to what is on disk; a reader finds the old file or the new one. A folder that cannot be written to is warned of."""
    path = machine.file(folder)
    partial = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Stages of a pipeline measure apart, and each adds its own.
        with FileLock(path.with_suffix(".lock"), timeout=_LOCK_SECONDS):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                products = {**read_times(folder, machine), **times}
            with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as partial:
                json.dump({"machine": asdict(machine), "products": products}, partial, indent=1)
            os.replace(partial.name, path)
    except (OSError, NotImplementedError) as error:  # the latter where the file system has no locks
        if partial is not None:
            Path(partial.name).unlink(missing_ok=True)
        warnings.warn(f"{path} could not be written, so the next run times its matmuls again: {error}", stacklevel=2)
