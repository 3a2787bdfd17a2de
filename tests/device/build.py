"""The tests' device, compiled once for its sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sysconfig
from pathlib import Path

from axonn_plugins.pccl import build

_HERE = Path(__file__).parent
_FLAGS = ["-std=c++20", "-O0", "-fPIC", "-fvisibility=hidden", "-Wall", "-DTORCH_EXTENSION_NAME=_late"]


def compiled(folder: Path | None = None) -> Path:
    """The extension module's file, compiled unless it is there.

    Args:
        folder: where it is to be; by default beside PCCL's, under the digest of its sources, this torch and this Python.
    """
    folder = build.folder().parent / "tests_device" / _digest() if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / "_late.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            from torch.utils import cpp_extension

            includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
            libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
            command = [build.compiler(), *_FLAGS, *(f"-isystem{path}" for path in includes)]
            together = folder / "together.cpp"  # torch's headers are read once
            together.write_text("".join(f'#include "{source}"\n' for source in sorted(_HERE.glob("*.cpp"))))
            names = ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lpthread"]
            made = folder / f"_late.{os.getpid()}.so"
            subprocess.run([*command, "-shared", str(together), *libraries, *names, "-o", str(made)], check=True)
            made.replace(built)
    return built


def _digest() -> str:
    import torch

    found = hashlib.sha256(repr((torch.__version__, sysconfig.get_config_var("EXT_SUFFIX"), _FLAGS)).encode())
    for source in sorted(_HERE.glob("*.[ch]pp")):
        found.update(source.read_bytes())
    return found.hexdigest()[:16]
