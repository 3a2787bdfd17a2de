"""The suite that users run on their clusters, `axonn test ted`: a few of its cases, and its command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

import ted_moe.dropless
import ted_moe.moe
from axonn_plugins import cli
from axonn_plugins.cluster.launch import launch
from axonn_plugins.ted import regression
from axonn_plugins.ted.regression_cli import main
from tests.matrix import thorough

FEW = "tensor 2, expert 2, data 1"


@pytest.mark.parametrize(("what", "count"), [(f"{FEW}  training", 1), thorough(FEW, 18)])
def test_four_ranks_of_this_machine(what, count):
    """In a process of its own, where nothing else is printed."""
    command = [sys.executable, "-m", "axonn_plugins.cli", "test", "ted", "--ranks", "4", "--filter", what]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert found.returncode == 0, found.stdout + found.stderr
    head, *lines, summary = found.stdout.splitlines()
    assert len(lines) == count and all(line.endswith("ok") for line in lines), found.stdout
    assert sum("training" in line for line in lines) == 1
    assert re.match(f"axonn test ted: all {count} cases equal stock DeepSpeed-MoE on 4 ranks", summary)


@pytest.mark.thorough
def test_ranks_of_a_launcher(capfd):
    """Ranks with torchrun's variables."""
    assert launch(cli.main, 2, ["test", "ted", "--filter", "tensor 2, expert 1, data 1  top-1,"]) == [0, 0]
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("axonn test ted: all 7 cases equal stock DeepSpeed-MoE on 2 ranks")


def test_a_difference_is_found(monkeypatch, capfd):
    exact = ted_moe.moe.combine
    monkeypatch.setattr(ted_moe.moe, "combine", lambda *arguments: exact(*arguments) * (1 + 1e-5))
    monkeypatch.setattr(ted_moe.dropless, "combine", lambda *arguments: exact(*arguments) * (1 + 1e-5))
    assert main(["--ranks", "2", "--filter", "expert 1, data 1  top-4, all on"]) == 1
    assert "DIFFERS" in capfd.readouterr().out


@pytest.mark.parametrize(
    "arguments, environment, message",
    [
        (["--ranks", "0"], {}, "--ranks = 0 is not a number of ranks"),
        (["--ranks", "8"], {"WORLD_SIZE": "4"}, "--ranks = 8, but the launcher started 4; leave --ranks out"),
        (
            ["--dtype", "fp32"],
            {},
            '--dtype = "fp32" is not known; use "float32", or another of float32, float64, bfloat16',
        ),
        (["--device", "tpu"], {}, '--device = "tpu" is not known; use "cpu", or another of cpu, cuda'),
        (["--filter", "tensor 3"], {}, '--filter = "tensor 3" is in no case, such as "tensor 1, expert 1, data 8'),
        (["--rank", "8", "x"], {}, "axonn test ted --help says what there is"),
    ],
)
def test_mistakes_are_one_sentence(arguments, environment, message, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["test", "ted", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_all_factorisations_are_there():
    found = {(t.tensor, t.expert, t.expert_data) for t in regression.topologies(8) if t.expert_tensor_parallel}
    assert found == {(t, e, 8 // (t * e)) for t in (1, 2, 4, 8) for e in (1, 2, 4, 8) if t * e <= 8}
