"""``make compatibility``: a table of Python, torch, DeepSpeed and megatron-core by version, and what was run with each.

    python -m tests.release.compatibility --write docs/reference/compatibility.md

Each minor version is tried in its newest patch, one thing other than in this environment at a time. Nothing is fetched that needs CUDA: a version of
torch counts where pip's index has a build for CPUs, and this environment's own always.
"""

from __future__ import annotations

import argparse
import ast
import os
import platform
import re
import shutil
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tests.release.environments import ROOT, create, pip, run

PATH = os.pathsep.join(str(ROOT / folder) for folder in (".", "plugins", "recipes"))
LIGHT = (
    "numpy",
    "pydantic>=2",
    "tyro>=1.0.17,<1.1",
    "filelock",
    "safetensors",
    "tqdm",
    "tomli",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
)
"""What the tests without a host stand on."""
HOST_FREE = (
    "tests/planner/test_axonn.py",
    "tests/planner/test_bubble.py",
    "tests/planner/test_calibration.py",
    "tests/planner/test_check.py",
    "tests/planner/test_context.py",
    "tests/planner/test_current_models.py",
    "tests/planner/test_mixers.py",
    "tests/planner/test_mixtures.py",
    "tests/planner/test_rest.py",
    "tests/planner/test_transformer.py",
    "tests/pccl/test_algorithms.py",
    "tests/pccl/test_simulate.py",
)
"""Tests that import neither torch nor a host."""
SUITES = {
    "deepspeed": ("tests/deepspeed/test_engine.py", "tests/deepspeed/test_samo.py"),
    "megatron-core": ("tests/megatron/test_layers.py",),
}
"""Tests that compare a host's training with one process, and do not run the stock host beside it."""
OLDEST = {"Python": (3, 10), "torch": (2, 8), "deepspeed": (0, 16), "megatron-core": (0, 16)}
ELSEWHERE = (
    (
        "torch",
        "2.11.0 with CUDA 13.0",
        "one H100, 1 to 6 ranks, Python 3.12, NCCL 2.28.9, Triton 3.6.0, DeepSpeed 0.19.8, megatron-core 0.16.1",
        "`axonn test gpu` and `python -m tests.device gpu`, in part: `recipes/axonn_recipes/gpu_test/README.md` says what was compared and what not",
    ),
    (
        "torch",
        "2.8, 2.9, 2.10 and 2.12",
        "a compiler",
        "PCCL's main C++ files read with its headers (-fsyntax-only); nothing ran",
    ),
)
"""By package: its version, where, and what was run there by hand."""
SECONDS = 900


@dataclass(frozen=True)
class Cell:
    """A version, and what came of it.

    Attributes:
        name: of the package, or Python.
        version: the whole of it.
        done: what was run there, or why nothing was.
        verdict: "passes", "fails" or "not run".
    """

    name: str
    version: str
    done: str
    verdict: str


def minor(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def on_index(name: str) -> list[str]:
    """Versions that pip finds, newest first; empty without an index."""
    said = subprocess.run([sys.executable, "-m", "pip", "index", "versions", name], capture_output=True, text=True)
    found = re.search(r"Available versions: (.*)", said.stdout)
    return found.group(1).split(", ") if found else []


def newest(name: str, versions: list[str]) -> dict[tuple[int, ...], str]:
    """The newest version of each minor one from the oldest that is supported on."""
    found: dict[tuple[int, ...], str] = {}
    for version in versions:
        if minor(version) >= OLDEST[name]:
            found.setdefault(minor(version), version)
    return dict(sorted(found.items()))


def pytest(python: Path, files: tuple[str, ...], deadline: float) -> tuple[str, str]:
    """Run tests; what was run, and the verdict."""
    began = time.perf_counter()
    done = run(
        [str(python), "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *files], ROOT, timeout=deadline, path=PATH
    )
    text = f"{len(files)} files of tests in {time.perf_counter() - began:.0f} s"
    skipped = sum(map(int, re.findall(r"^SKIPPED \[(\d+)\]", done.stdout, re.M)))
    text += f", {skipped} skipped" if skipped else ""
    if done.returncode:
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
        print(done.stdout[-4000:], done.stderr[-2000:], file=sys.stderr)
        text += f": {len(failed)} fail, the first {failed[0] if failed else 'when it is imported'}"
    return text, "fails" if done.returncode else "passes"


def pythons() -> dict[tuple[int, ...], str]:
    """Interpreters that are here, by their minor versions: on PATH, and pyenv's."""
    found = {}
    for number in range(OLDEST["Python"][1], 20):
        here = shutil.which(f"python3.{number}")
        versions = sorted(Path.home().glob(f".pyenv/versions/3.{number}.*/bin/python"))
        for each in ([here] if here else []) + [str(one) for one in versions]:
            said = subprocess.run(
                [each, "-c", "import sys; print(*sys.version_info[:3], sep='.')"], capture_output=True, text=True
            )
            if not said.returncode and minor(said.stdout) == (3, number):
                found[3, number] = each
                break
    return found


def python_cells(folder: Path) -> Iterator[Cell]:
    """Each Python: this one by the suite, others by what needs no torch."""
    here = pythons() | {sys.version_info[:2]: sys.executable}
    for number in sorted({*here, *((3, one) for one in range(10, 14))}):
        name = ".".join(map(str, number))
        if number == sys.version_info[:2]:
            yield Cell("Python", platform.python_version(), "everything below", "passes")
            continue
        if number not in here:
            sources = [
                file
                for top in ("axonn_tp", "plugins", "recipes", "samo", "ted_moe")
                for file in (ROOT / top).rglob("*.py")
            ]
            for file in sources:
                ast.parse(file.read_text(), feature_version=number)
            yield Cell("Python", name, f"not here: {len(sources)} files parsed by its grammar", "not run")
            continue
        python = create(folder / name, here[number])
        pip(python, *LIGHT)
        sources = [str(ROOT / top) for top in ("axonn_tp", "plugins", "recipes", "samo", "ted_moe")]
        compiled = run([str(python), "-m", "compileall", "-q", "-f", *sources], ROOT, path=PATH)
        answers = [
            run([str(python), "-m", "axonn_plugins.cli", *words], folder, path=PATH)
            for words in (["--help"], ["schema"])
        ]
        text, verdict = pytest(python, HOST_FREE, SECONDS)
        if compiled.returncode or any(one.returncode for one in answers):
            verdict = "fails"
        version = run([str(python), "-c", "import platform; print(platform.python_version())"], folder).stdout.strip()
        yield Cell(
            "Python", version, f"no torch installed: all compiled, `axonn --help`, `axonn schema`, {text}", verdict
        )


def torch_cells(folder: Path) -> Iterator[Cell]:
    """Each torch: this environment's by the suite, others where the index has a build for CPUs, which says so in its version."""
    here, versions = metadata.version("torch"), on_index("torch")
    for number, version in newest("torch", versions or [here]).items():
        built = next((one for one in versions if minor(one) == number and one.endswith("+cpu")), None)
        if number == minor(here):
            yield Cell("torch", here, "everything below", "passes")
        elif built is None:
            yield Cell("torch", version, "the index has no build for CPUs alone", "not run")
        else:
            python = create(folder / f"torch-{built}", below=Path(site.getsitepackages()[0]))
            pip(python, "--no-deps", f"torch=={built}")
            yield Cell("torch", built, *pytest(python, SUITES["deepspeed"], SECONDS))


def host_cells(name: str, folder: Path) -> Iterator[Cell]:
    """Each version of a host above this environment's packages."""
    here = metadata.version(name)
    for number, version in newest(name, on_index(name) or [here]).items():
        if number == minor(here):
            python, version = Path(sys.executable), here
        else:
            python = create(folder / f"{name}-{version}", below=Path(site.getsitepackages()[0]))
            pip(python, "--no-deps", f"{name}=={version}")
        yield Cell(name, version, *pytest(python, SUITES[name], SECONDS))


def page(cells: list[Cell]) -> str:
    """The table in Markdown."""
    rows = [f"| {cell.name} | {cell.version} | {cell.verdict} | {cell.done} |" for cell in cells]
    return "\n".join(
        [
            "# Versions that were run",
            "",
            "Written by `make compatibility`, which tries each minor version in its newest patch, one thing other than in the environment of",
            "`make setup` at a time.",
            "Which versions are asked for, and why, is under [releases](../releases.md#which-versions-go-together).",
            "",
            "| | version | | what was run |",
            "|---|---|---|---|",
            *rows,
            "",
            "Tests of a host compare its training with one process, without the stock host beside it. A version that pip's index lacks is not in the table.",
            *(f"Of {name}: {', '.join(f'`{file}`' for file in files)}." for name, files in SUITES.items()),
            *elsewhere(),
        ]
    )


def elsewhere() -> list[str]:
    """The table of what the command cannot run again."""
    return [
        "",
        "## Run by hand on other machines",
        "",
        "`make compatibility` installs what is for CPUs alone, and writes these rows as they were noted.",
        "",
        "| | version | where | what was run |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in ELSEWHERE),
        "",
    ]


def main() -> int:
    """Try all; returns the exit code, 1 where something fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="the page to write; else it is printed")
    given = parser.parse_args()
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for some in (
            python_cells(folder),
            torch_cells(folder),
            host_cells("deepspeed", folder),
            host_cells("megatron-core", folder),
        ):
            for cell in some:
                print(f"{cell.name} {cell.version}: {cell.verdict}; {cell.done}", file=sys.stderr)
                cells.append(cell)
    if given.write:
        given.write.write_text(page(cells))
    else:
        print(page(cells))
    return int(any(cell.verdict == "fails" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
