"""``make wheel``: build sdist and wheel, and check the wheel alone in an environment that has nothing else.

    python -m tests.release.wheel
    python -m tests.release.wheel --python python3.13    # in an environment of another Python

It is built from the sdist, holds every file of the packages, and installed with what it asks for it imports, answers `axonn --help` and
`axonn doctor`, and trains on two ranks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

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


def main() -> int:
    """Build and check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the bare environment")
    given = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(ROOT)], check=True)
        (wheel,) = (folder / "dist").glob("*.whl")
        if missing := expected() - set(zipfile.ZipFile(wheel).namelist()):
            print(f"{wheel.name} lacks {', '.join(sorted(missing))}", file=sys.stderr)
            return 1
        python = create(folder / "bare", given.python)
        pip(python, "-c", str(ROOT / "constraints.txt"), str(wheel))
        axonn = str(python.parent / "axonn")
        for command in (
            [str(python), "-c", IMPORTS],
            [axonn, "--help"],
            [axonn, "doctor"],
            [axonn, "train", "quickstart", "--ranks", "2", "--gx", "2", "--gz", "1", "--steps", "4", "--runs", name],
        ):
            done = run(command, folder)
            words = " ".join(["axonn" if each == axonn else each for each in command])
            if done.returncode:
                print(f"{words}\n{done.stdout}{done.stderr}", file=sys.stderr)
                return 1
            print(f"works: {words}")
        (ROOT / "dist").mkdir(exist_ok=True)
        for file in (folder / "dist").iterdir():
            file.replace(ROOT / "dist" / file.name)
            print(f"dist/{file.name}")
    print(f"in {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
