"""Environments to try a release in, and what runs there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def create(folder: Path, python: str = sys.executable, below: Path | None = None) -> Path:
    """Make a virtual environment.

    Args:
        folder: where it goes.
        python: its interpreter.
        below: a folder of packages that are found where the environment has none of the name.

    Returns:
        Its interpreter.
    """
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    if below is not None:
        (site,) = folder.glob("lib/python*/site-packages")
        # addsitedir, as a folder of packages has .pth files of its own.
        (site / "below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
    return folder / "bin" / "python"


def pip(python: Path, *arguments: str) -> None:
    """Install into an environment, from wherever pip is told to.

    Raises:
        subprocess.CalledProcessError: pip fails; it has said why.
    """
    said = subprocess.run(
        [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments],
        env=os.environ | {"DS_BUILD_OPS": "0", "PIP_USE_PEP517": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    # Folders that have no page of a package are told as warnings, by the dozen.
    print(*(line for line in said.stderr.splitlines() if "is ignored: it is neither" not in line), sep="\n", end="")
    said.check_returncode()


def run(command: list[str], cwd: Path, timeout: float = 600, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command as a user would: nothing of this checkout is found but by `path`, a PYTHONPATH."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | ({"PYTHONPATH": path} if path else {})
    env["PATH"] = f"{Path(command[0]).parent}{os.pathsep}{env.get('PATH', '')}"
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
