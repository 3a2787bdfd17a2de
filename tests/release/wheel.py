"""``make wheel``: build sdist and wheel, and check the wheel alone in an environment that has nothing else.

    python -m tests.release.wheel
    python -m tests.release.wheel --python python3.13    # in an environment of another Python

It is built from the sdist, holds every file of the packages, and installed with what it asks for it imports, answers `axonn --help` and
`axonn doctor`, and trains on two ranks. In the other Pythons that are here it is installed, too: like that where pip's index has a torch for CPUs
alone, else without torch, where all of it compiles and `axonn` answers and plans.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from tests.release.compatibility import LIGHT, pythons
from tests.release.environments import ROOT, create, pip, run

HOMES = {
    "axonn_tp": "axonn_tp",
    "samo": "samo",
    "ted_moe": "ted_moe",
    "plugins/axonn_plugins": "axonn_plugins",
    "recipes/axonn_recipes": "axonn_recipes",
}
"""Where each package lies in a checkout, and how it is called."""
NOT_PACKED = (".png",)
"""Pictures of READMEs, which stand in the repository alone."""
IMPORTS = f"import {', '.join(HOMES.values())}; print(axonn_plugins.__version__, axonn_tp.__file__)"


def expected() -> set[str]:
    """Files that the wheel has to hold, by their paths in it."""
    listed = subprocess.run(["git", "ls-files", *HOMES], cwd=ROOT, capture_output=True, text=True, check=True)
    found = set()
    for line in listed.stdout.splitlines():
        home = next(home for home in HOMES if line.startswith(f"{home}/"))
        if not line.endswith(NOT_PACKED) and not (line.endswith("README.md") and home != "recipes/axonn_recipes"):
            found.add(HOMES[home] + line.removeprefix(home))
    return found


def has_torch(python: Path) -> bool:
    """True if pip finds a torch for CPUs alone, of the version that constraints.txt has, for an environment's Python."""
    said = run([str(python), "-m", "pip", "index", "versions", "torch"], ROOT).stdout
    (version,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    return f"{version}+cpu" in said


def install(python: Path, wheel: Path, whole: bool) -> list[list[str]]:
    """Install the wheel in an environment, with what it asks for or with what needs no torch; the commands that must work then."""
    axonn = str(python.parent / "axonn")
    if whole:
        pip(python, "-c", str(ROOT / "constraints.txt"), str(wheel))
        train = ["train", "quickstart", "--ranks", "2", "--gx", "2", "--gz", "1", "--steps", "4", "--runs", "runs"]
        return [[str(python), "-c", IMPORTS], [axonn, "--help"], [axonn, "doctor"], [axonn, *train]]
    pip(python, *LIGHT)
    pip(python, "--no-deps", str(wheel))
    (installed,) = python.parent.parent.glob("lib/python*/site-packages")
    compiled = [str(python), "-m", "compileall", "-q", "-f", *(str(installed / home) for home in HOMES.values())]
    plan = "plan --machine perlmutter --model gpt-20b --gpus 256 --tokens-per-batch 2M".split()
    return [compiled, [axonn, "--help"], [axonn, "schema"], [axonn, *plan]]


def works(folder: Path, interpreter: str, wheel: Path) -> bool:
    """Try the wheel in a new environment of an interpreter, and say what worked; True if all did."""
    shutil.rmtree(folder, ignore_errors=True)
    python = create(folder, interpreter)
    whole = interpreter == sys.executable or has_torch(python)
    commands = install(python, wheel, whole)
    version = run([str(python), "-c", "import platform; print(platform.python_version())"], folder).stdout.strip()
    print(
        f"Python {version}, {'with all that it asks for' if whole else 'for which pip has no torch for CPUs alone: without it'}"
    )
    for command in commands:
        done = run(command, folder)
        words = " ".join([Path(command[0]).name, *(each.removeprefix(f"{folder}/") for each in command[1:])])
        if done.returncode:
            print(f"{words}\n{done.stdout}{done.stderr}", file=sys.stderr)
            return False
        print(f"works: {words}", flush=True)
    return True


def main() -> int:
    """Build and check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="the interpreter of the bare environment; by itself all that are here")
    given = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(ROOT)], check=True)
        (wheel,) = (folder / "dist").glob("*.whl")
        if missing := expected() - set(zipfile.ZipFile(wheel).namelist()):
            print(f"{wheel.name} lacks {', '.join(sorted(missing))}", file=sys.stderr)
            return 1
        others = [one for number, one in pythons().items() if number != sys.version_info[:2]]
        for interpreter in [given.python] if given.python else [sys.executable, *others]:
            if not works(folder / "bare", interpreter, wheel):
                return 1
        (ROOT / "dist").mkdir(exist_ok=True)
        for file in (folder / "dist").iterdir():
            file.replace(ROOT / "dist" / file.name)
            print(f"dist/{file.name}")
    print(f"in {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
