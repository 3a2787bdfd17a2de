"""Parts of a release: versions, bounds, scripts for clusters, templates, and what makes its table."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import axonn_plugins
from tests.release import compatibility, wheel
from tests.release.environments import ROOT

CLUSTER = ROOT / "recipes" / "axonn_recipes" / "examples" / "cluster"


def test_one_version_everywhere() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    version = setup["metadata"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.search(r"^## \[(\d\S*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released and released[1] == version == axonn_plugins.__version__ == citation["version"]
    assert citation["date-released"] == released[2]


@pytest.mark.parametrize("name", ["slow", "wish", "wrong_result"])
def test_issue_templates_are_forms(name: str) -> None:
    """As GitHub reads them: a comma without quotes makes a second key of what follows it."""
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert {"name", "description", "body"} <= form.keys()
    for field in form["body"]:
        assert field["type"] in ("textarea", "input")
        assert {"label"} <= field["attributes"].keys() <= {"label", "description", "render"}
        assert field.get("validations", {}).keys() <= {"required"}


@pytest.mark.parametrize("script", ["deepspeed", "megatron"])
def test_slurm_starts_torchrun_on_each_node(script: str, tmp_path: Path) -> None:
    """With stand-ins for what a cluster has: what srun is told to run."""
    for name, body in {"scontrol": "echo node7; echo node8", "srun": 'shift; printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "99",
        "MEGATRON_LM_PATH": "/megatron",
    }
    done = subprocess.run(
        ["bash", str(CLUSTER / f"{script}.sbatch"), "a b", "--steps"], env=env, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    words = done.stdout.splitlines()
    assert words[0] == "torchrun" and words[-2:] == ["a b", "--steps"]
    assert words[words.index("--rdzv-endpoint") + 1] == "node7:29500"
    if script == "megatron":
        assert words[words.index("--axonn-gx") + 1] == "4" and words[words.index("--axonn-gz") + 1] == "2"
        del env["MEGATRON_LM_PATH"]
        asked = subprocess.run(["bash", str(CLUSTER / "megatron.sbatch")], env=env, capture_output=True, text=True)
        assert asked.returncode and "set it to a checkout" in asked.stderr


def test_dockerfile() -> None:
    """By hadolint where it is installed, and what it would say first where it is not."""
    file = CLUSTER / "Dockerfile"
    if linter := shutil.which("hadolint"):
        done = subprocess.run([linter, str(file)], capture_output=True, text=True)
        assert not done.returncode, done.stdout
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", file.read_text(), flags=re.M))
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    assert {name for name, _ in steps} <= {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}
    assert steps[0][0] == "FROM" and ":" in steps[0][1] and not steps[0][1].endswith(":latest")
    for name, said in steps:
        if name == "RUN" and "apt-get install" in said:
            assert (
                "apt-get update" in said and "--no-install-recommends" in said and "rm -rf /var/lib/apt/lists" in said
            )
        if name == "RUN" and "pip install" in said:
            assert "--no-cache-dir" in said


def test_the_wheel_is_to_hold_every_file() -> None:
    names = wheel.expected()
    assert {"axonn_plugins/axonn.schema.json", "axonn_plugins/cluster/switch.c", "axonn_plugins/py.typed"} <= names
    assert "axonn_recipes/examples/cluster/deepspeed.sbatch" in names
    assert not any(name.startswith(("plugins/", "recipes/", "tests/")) for name in names)


def test_the_table_takes_the_newest_of_each_minor_version() -> None:
    found = compatibility.newest("deepspeed", ["0.19.8", "0.19.7", "0.18.9", "0.16.9", "0.15.4"])
    assert list(found.values()) == ["0.16.9", "0.18.9", "0.19.8"]
    cell = compatibility.Cell("deepspeed", "0.18.9", "2 files of tests in 9 s", "passes")
    assert "| deepspeed | 0.18.9 | passes | 2 files of tests in 9 s |" in compatibility.page([cell])


def test_tests_without_a_host_are_there() -> None:
    for file in compatibility.HOST_FREE + tuple(file for files in compatibility.SUITES.values() for file in files):
        assert (ROOT / file).is_file(), file
