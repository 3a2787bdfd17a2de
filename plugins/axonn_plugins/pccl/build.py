"""The C++ part: compiled when it is first asked for, and kept."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType

from axonn_plugins import processors
from axonn_plugins.caches import cache_folder
from axonn_plugins.observe.clock import elapsed

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-DTORCH_EXTENSION_NAME=_pccl"]
_UNITS = (("shim", "module"), ("device", "router", "schedule"), ("engine",))
"""Sources that are compiled as one, and one more unit of all others: reading torch's headers takes longer than compiling the
sources that need them."""


class BuildError(RuntimeError):
    """The C++ part cannot be had."""


def compiler() -> str:
    """The C++ compiler's command.

    Raises:
        BuildError: there is none.
    """
    command = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if command is None:
        raise BuildError(
            "pccl is compiled when it is first used, and no C++ compiler was found; install one (on Debian: apt-get install "
            'g++), or name one in CXX, or use another backend ("gloo", "nccl")'
        )
    return command


def folder() -> Path:
    """Where what was compiled is kept."""
    return cache_folder() / "pccl"


def place() -> Path:
    """The file of the extension module of these sources, this torch and this Python, compiled or not."""
    import torch

    digest = hashlib.sha256(repr((torch.__version__, sysconfig.get_config_var("EXT_SUFFIX"), _FLAGS)).encode())
    for source in sorted(_SOURCES.glob("*.[ch]pp")):
        digest.update(source.read_bytes())
    return folder() / digest.hexdigest()[:16] / "_pccl.so"


@cache
def load() -> ModuleType:
    """The extension module, compiled now if it never was.

    Raises:
        BuildError: it does not compile; the compiler's words are in it. Or what was compiled before does not load here.
    """
    built = place()
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        with open(built.parent / "lock", "w") as lock:
            # Ranks of one node ask at the same time: one compiles, the others wait.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not built.exists():
                with elapsed("compiling pccl, once"):
                    _compile(sorted(_SOURCES.glob("*.cpp")), built)
    spec = importlib.util.spec_from_file_location("_pccl", built)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BuildError(
            f"what was compiled of pccl in {built.parent} does not load on this node ({error}); remove that folder, or give nodes "
            "with other system libraries a cache of their own in AXONN_CACHE"
        ) from error
    return module


def _compile(sources: list[Path], to: Path) -> None:
    from torch.utils import cpp_extension

    command = shlex.split(compiler())  # which may begin with another one's name, as of ccache
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    flags = [*_FLAGS, *(f"-isystem{path}" for path in includes)]
    with tempfile.TemporaryDirectory(dir=to.parent) as scratch:
        units = _units(sources, Path(scratch))
        objects = [unit.with_suffix(".o") for unit in units]
        running: list[subprocess.Popen] = []
        with ThreadPoolExecutor(processors.usable()) as pool:
            jobs = zip(units, objects, strict=True)
            done = pool.map(lambda job: _run([*command, *flags, "-c", str(job[0]), "-o", str(job[1])], running), jobs)
            try:
                list(done)
            except BaseException:  # also Ctrl-C: the pool waits for what runs
                pool.shutdown(wait=False, cancel_futures=True)
                for process in running:
                    process.kill()
                raise
        built = Path(scratch) / to.name
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        names = ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
        _run([*command, "-shared", *map(str, objects), *libraries, *names, "-lpthread", "-o", str(built)], running)
        built.replace(to)


def _units(sources: list[Path], folder: Path) -> list[Path]:
    """The files to compile, written to the folder: each includes the sources of one unit."""
    with_torch, with_device, engine = _UNITS
    # Apart they are sooner done where there are cores for all units; together they take less of the processor's time.
    with_headers = [with_torch + with_device] if processors.usable() <= 2 else [with_torch, with_device]
    named = {name for unit in _UNITS for name in unit}
    others = [source.stem for source in sources if source.stem not in named]
    units = []
    for names in (*with_headers, engine, others):
        units.append(folder / f"{names[0]}_unit.cpp")
        units[-1].write_text("".join(f'#include "{_SOURCES / name}.cpp"\n' for name in names))
    return units


def _run(command: list[str], running: list[subprocess.Popen]) -> None:
    try:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise BuildError(
            f"pccl is compiled when it is first used, and {command[0]} cannot be run: {error.strerror}; name a C++ compiler in CXX"
        ) from None
    with process:
        running.append(process)
        said = process.communicate()[1]
    if process.returncode:
        raise BuildError(f"pccl does not compile: {' '.join(command)}\n{said[-4000:]}")
