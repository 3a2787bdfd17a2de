"""``axonn test gpu``: its dry form runs every system, and whatever goes wrong in one is said of that one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from axonn_plugins.cli import main
from axonn_plugins.cluster.launch import free_port
from axonn_recipes.gpu_test import agents, launchers, report
from axonn_recipes.gpu_test.scale import Check, Found, Scale, scale_of
from axonn_recipes.gpu_test.systems import SYSTEMS
from axonn_recipes.gpu_test.training import spans_hidden
from tests.forked import Forked
from tests.matrix import thorough

BROKEN = "tests.recipes.test_gpu_test"


def dry(folder: Path, *words: str) -> tuple[int, dict]:
    code = main(["test", "gpu", "--dry", "--report", str(folder / "found"), *words])
    return code, json.loads((folder / "found.json").read_text())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", [("--ranks", "2"), thorough(())])
def test_dry_runs_every_system(tmp_path: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    code, numbers = dry(tmp_path, *words)
    said = capfd.readouterr().out
    assert code == 0, said
    assert f"{len(SYSTEMS)} of {len(SYSTEMS)} systems ok" in said
    assert list(numbers["systems"]) == list(SYSTEMS) and not numbers["left_out"] and numbers["dry"]
    text = (tmp_path / "found.md").read_text()
    for name, system in numbers["systems"].items():
        assert system["verdict"] == "ok" and not system["errors"]
        assert re.search(rf"^\| {name} \| ok \|", text, re.M)
        if name == "machine":
            assert all(figure["value"] > 0 for figure in system["figures"])
            continue
        assert system["checks"] and all(check["difference"] <= check["allowed"] for check in system["checks"])
        # Each beside a peer of its own, and what a CPU does not tell is not made up.
        assert {side["ours"] for side in system["sides"]} == {True, False}
        assert all(seconds > 0 for side in system["sides"] for seconds in side["seconds"])
        assert all(figure["value"] is None for figure in system["figures"] if figure["name"].startswith("MFU"))


def run(scale: Scale) -> Found:
    """A system of this file, which goes wrong as AXONN_TEST_FAULT says; found by the ranks that are forked."""
    fault, last = os.environ["AXONN_TEST_FAULT"], dist.get_rank() == scale.ranks - 1
    if fault == "raises" and last:
        raise ValueError("the last rank will not")
    if fault == "dies" and last:
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "hangs":
        time.sleep(1000)
    if fault == "raises" or fault == "dies":
        dist.barrier()  # for ever
    return Found([Check("a number", float("inf"), 1e-9)])


@pytest.mark.parametrize(
    ("fault", "rank", "words"),
    [
        thorough("raises", "1", "ValueError: the last rank will not"),
        ("dies", "1", "it was ended by SIGSEGV"),
        thorough("hangs", None, "it did not end within 4 s"),
        ("differs", None, None),
    ],
)
def test_a_system_that_goes_wrong_does_not_keep_the_others(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    rank: str | None,
    words: str | None,
) -> None:
    monkeypatch.setenv("AXONN_TEST_FAULT", fault)
    monkeypatch.setattr(agents, "_GRACE", 1.0)
    broken = SYSTEMS["kernels"].__class__(BROKEN, "nothing")
    monkeypatch.setitem(SYSTEMS, "kernels", broken)  # type: ignore[index]
    patience = ["--patience", "4"] if fault == "hangs" else []
    code, numbers = dry(tmp_path, "--ranks", "2", "--only", "kernels", "--only", "machine", *patience)
    said = capfd.readouterr().out
    assert code == 1 and "1 of 2 systems ok: not kernels" in said
    assert numbers["systems"]["machine"]["verdict"] == "ok"
    system, text = numbers["systems"]["kernels"], (tmp_path / "found.md").read_text()
    if words is None:
        assert system["verdict"] == "differs" and system["checks"][0]["difference"] == "inf"
        assert "- DIFFERS: a number: inf, allowed 1e-09" in text
        return
    assert system["verdict"] == "failed" and words in said and words in text
    first, error = next(iter(system["errors"].items()))
    assert words in error and rank in (None, first)
    if rank is not None:
        assert "since rank 1 had failed" in system["errors"]["0"] or "Connection" in system["errors"]["0"]


def test_a_rank_that_died_comes_before_one_that_lost_its_connection_and_told_first() -> None:
    store, died = dist.HashStore(), "it was ended by SIGSEGV"
    store.set("failed", "0")
    for rank, said in enumerate(
        [(agents._OF_OTHERS, "lost"), (agents._STOPPED, ""), (agents._OWN, died), (agents._NONE, "")]
    ):
        store.set(f"said {rank}", json.dumps(said))
    errors = agents.Agent._all_said(SimpleNamespace(ranks=4, patience=1.0), store)  # type: ignore[arg-type]
    assert list(errors.items()) == [(2, died), (0, "lost"), (1, "it was stopped, since rank 2 had failed")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "gpu"]) == 2
    said = capfd.readouterr()
    assert said.out == "" and said.err == (
        f"axonn: error: axonn test gpu needs a GPU, and torch {torch.__version__} sees none on this machine; run it where there is one, "
        "or add --dry to run the same code on CPU ranks\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dry", "--only", "tp"], '--only = "tp" is no system; choose from machine, kernels'),
        (["--dry", "--ranks", "0"], "--ranks = 0 is not a positive number"),
        (["--dry", "--rounds", "-1"], "--rounds = -1 is not a positive number"),
        (["--dry", "--share"], "--share is for ranks that share GPUs, but --dry has no GPUs"),
    ],
)
def test_mistakes_are_one_sentence(capfd: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["test", "gpu", *words]) == 2
    assert said in capfd.readouterr().err


MACHINE = ["test", "gpu", "--dry", "--only", "machine", "--report"]


@pytest.mark.thorough
def test_under_torchrun(tmp_path: Path) -> None:
    words = ["-m", "axonn_plugins.cli", *MACHINE, str(tmp_path / "found")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "found.json").read_text())["machine"]["ranks"] == 2


def test_under_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are the launcher's, whose store is used: forked, with the variables of torchrun, and its store here."""
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        with monkeypatch.context() as patch:
            for name, value in {**address, **place}.items():
                patch.setenv(name, value)
            ranks.append(Forked([*MACHINE, str(tmp_path / "found")]))
    # Served only now: a fork beside the store's thread may find its locks held for good.
    store = dist.TCPStore("localhost", int(address["MASTER_PORT"]), 2, True, wait_for_workers=False)
    for rank in ranks:
        (said,) = rank.communicate()
        assert rank.returncode == 0, said
    assert store.num_keys() > 0
    assert json.loads((tmp_path / "found.json").read_text())["machine"]["ranks"] == 2


def test_variables_of_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that it is taken back
        monkeypatch.delenv(name)
    assert not launchers.as_rank()
    slurm = {
        "PROCID": "5",
        "STEP_NUM_TASKS": "8",
        "LOCALID": "1",
        "STEP_TASKS_PER_NODE": "4(x2)",
        "STEP_NODELIST": "n[3-4]",
    }
    for name, value in (slurm | {"JOB_ID": "123456"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    told = SimpleNamespace(stdout="n3\nn4\n")
    monkeypatch.setattr(launchers.subprocess, "run", lambda *arguments, **options: told)
    assert launchers.as_rank()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [os.environ[name] for name in names] == ["5", "8", "1", "4", "n3", "23456"]


def test_figures_of_a_gpu() -> None:
    """The parts of a run on GPUs that can be tried without one."""
    kernels = [
        ("gemm", 0, 4),
        ("ncclDevKernel_AllReduce", 2, 8),
        ("add", 3, 5),
        ("ncclDevKernel_AllGather", 8, 10),
        ("x", 9, 12),
    ]
    assert spans_hidden(kernels) == pytest.approx((3 + 1) / 8)
    assert spans_hidden([("gemm", 0, 4)]) is None
    for ranks in (1, 2, 3, 6, 8, 16):
        scale = scale_of("cuda", False, ranks, min(ranks, 8), None)
        for model in (scale.compared, scale.timed):
            assert model.heads % ranks == 0 and model.hidden % model.heads == 0
    assert report.shown(report.Figure("x", None, "%")) == "-"
