import configparser
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from axonn_plugins import build_locks
from axonn_plugins.cli import doctor as doctor_command
from axonn_plugins.hosts.transformers import accelerate_patch
from axonn_plugins.observe import doctor
from axonn_plugins.observe.doctor import Check

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("AXONN_PLUGINS", "TORCH_DEVICE_BACKEND_AUTOLOAD", "MEGATRON_LM_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)


@pytest.fixture
def installed(monkeypatch):
    """Distributions as the doctor sees them; a test edits the versions."""
    versions = {"axonn-plugins": "0.2.0", "torch": "2.13.0+cpu", "deepspeed": "0.19.8", "pydantic": "2.14.3"}
    entry = importlib.metadata.EntryPoint("axonn", "axonn_plugins.autoload:activate", "torch.backends")
    monkeypatch.setattr(doctor, "_installed_version", versions.get)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [entry])
    return versions


def named(checks, name):
    return next(check for check in checks if check.name == name)


def printed(capsys, checks, monkeypatch):
    monkeypatch.setattr(doctor, "report", lambda: checks)
    return doctor.main(), capsys.readouterr().out


def test_a_ready_environment(installed, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_GLOO_PROBE", "pass")
    assert doctor.main() == 0
    out = capsys.readouterr().out
    assert "a group of one rank works" in out and out.endswith("The core is ready.\n")


def test_the_report_as_json(installed, capsys, monkeypatch):
    monkeypatch.setattr(
        doctor, "report", lambda: [Check("torch", "ok", "2.13.0"), Check("gloo", "problem", "no", "do")]
    )
    assert doctor_command.main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ready"] is False and found["checks"][1] == {
        "name": "gloo",
        "state": "problem",
        "detail": "no",
        "remedy": "do",
        "core": True,
    }


def test_it_runs_as_a_program_without_a_traceback():
    program = [sys.executable, "-m", "axonn_plugins.observe.doctor"]
    done = subprocess.run(program, capture_output=True, text=True, cwd=ROOT)
    # Run from a checkout, the suite need not be installed: then the exit code says so.
    installed = importlib.metadata.entry_points(group="torch.backends", name="axonn")
    assert done.returncode == (0 if installed else 1), done.stdout
    assert "a group of one rank works" in done.stdout and "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["axonn-plugins", "torch", "deepspeed", "pydantic"])
def test_a_missing_package_is_reported(installed, monkeypatch, capsys, name):
    del installed[name]
    checks = list(doctor._versions())
    missing = named(checks, name)
    assert missing.state == "missing" and "install" in missing.remedy
    code, out = printed(capsys, checks, monkeypatch)
    assert code == 1 and f"The core is not ready: {name}." in out


def test_an_old_package_is_a_problem(installed):
    installed["torch"] = "2.7.1+cu126"
    old = named(doctor._versions(), "torch")
    assert (old.state, old.remedy) == ("problem", "install torch 2.8 or newer")


def test_the_bounds_are_those_of_setup_cfg():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    required = config["options"]["install_requires"].split()
    for name, least in doctor.REQUIRED.items():
        below = f",<{doctor._dotted(doctor.BELOW[name])}" if name in doctor.BELOW else ""
        assert f"{name}>={doctor._dotted(least)}{below}" in required
    extras = config["options.extras_require"]
    hosts = {
        f"{name}>={doctor._dotted(least)},<{doctor._dotted(below)}" for name, (least, below) in doctor.HOSTS.items()
    }
    assert {*extras["megatron"].split(), *extras["huggingface"].split(), *extras["lightning"].split()} == hosts
    assert hosts - set(extras["lightning"].split()) <= set(extras["dev"].split("\n"))


@pytest.mark.parametrize(
    ("version", "state"), [(None, "optional-missing"), ("0.16.1", "ok"), ("0.15.0", "problem"), ("0.21.0", "problem")]
)
def test_megatron_core_never_breaks_the_core(installed, version, state):
    if version:
        installed["megatron-core"] = version
    check = named(doctor._hosts(), "megatron-core")
    assert check.state == state and not check.core


def test_a_deepspeed_that_was_not_tried_is_told(installed):
    installed["deepspeed"] = "0.20.1"
    newest = named(doctor._versions(), "deepspeed's newest")
    assert newest.state == "problem" and not newest.core and "deepspeed>=0.16,<0.20" in newest.remedy


@pytest.mark.parametrize("variable", ["AXONN_PLUGINS", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_a_switched_off_activation_is_named(installed, monkeypatch, variable):
    assert [check.state for check in doctor._entry_point()] == ["ok"]
    monkeypatch.setenv(variable, "0")
    (check,) = doctor._entry_point()
    assert check.state == "problem" and variable in check.detail


def test_without_the_entry_point_the_block_would_be_ignored(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [])
    (check,) = doctor._entry_point()
    assert check.state == "problem" and "axonn_plugins.activate()" in check.remedy


@pytest.mark.parametrize("other", ["axonn_plugins.py", "samo/__init__.py", "samo/data.txt", "ted_moe.py"])
def test_another_package_of_the_name_is_found(tmp_path, monkeypatch, other):
    (tmp_path / other).parent.mkdir(exist_ok=True)
    (tmp_path / other).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / folder) for folder in (".", "plugins", "recipes")))
    (check,) = doctor._package_found()
    named = other.partition("/")[0].removesuffix(".py")
    if other.endswith(".txt"):  # a folder without __init__.py gives way to a package
        assert check.state == "ok"
    else:
        assert check.state == "problem" and named in check.detail


@pytest.mark.parametrize(
    ("module", "state", "words"),
    [("optimizers/fused_adam.py", "ok", "FusedAdam"), ("lib/libapex.py", "problem", "PyPI's apex is another project")],
)
def test_the_two_apexes_are_told_apart(tmp_path, monkeypatch, module, state, words):
    file = tmp_path / "apex" / module
    file.parent.mkdir(parents=True)
    file.touch()
    (tmp_path / "apex" / "__init__.py").write_text("raise ImportError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    (check,) = doctor._apex()
    assert check.state == state and words in check.detail and not check.core


def test_a_backend_that_fails_is_quoted(monkeypatch):
    monkeypatch.setattr(doctor, "_GLOO_PROBE", "raise RuntimeError('no interface')")
    (check,) = doctor._gloo()
    assert (check.state, check.detail) == ("problem", "RuntimeError: no interface")


def test_a_backend_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(doctor, "_GLOO_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "_PROBE_SECONDS", 0.2)
    (check,) = doctor._gloo()
    assert check.state == "problem" and "GLOO_SOCKET_IFNAME" in check.remedy


def test_megatron_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tmp_path))
    assert next(iter(doctor._megatron_checkout())).state == "problem"
    (tmp_path / "pretrain_gpt.py").touch()
    assert next(iter(doctor._megatron_checkout())).state == "ok"


@pytest.mark.parametrize(("core", "code"), [(True, 1), (False, 0)])
def test_a_check_that_fails_is_a_row(monkeypatch, capsys, core, code):
    def _broken_part():
        yield Check("first", "ok", "seen")
        raise OSError("first line\nlast line")

    checks = doctor._guarded(_broken_part, core)
    assert [(check.name, check.detail) for check in checks] == [("broken part", "OSError: last line")]
    assert printed(capsys, checks, monkeypatch)[0] == code


def test_a_broken_torch_is_a_row(installed, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor, "_GLOO_PROBE", "pass")
    checks = doctor.report()
    assert named(checks, "devices").state == "problem"
    assert all(isinstance(check, Check) for check in checks)


def test_pccl_says_whether_it_is_compiled_by_what_and_where_it_listens(monkeypatch, tmp_path):
    monkeypatch.setenv("AXONN_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "some-compiler")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    (check,) = doctor._pccl()
    assert check.state == "ok" and "by some-compiler" in check.detail and "127.0.0.1" in check.detail
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    (check,) = doctor._pccl()
    assert check.state == "optional-missing" and "g++" in check.remedy
    monkeypatch.setenv("AXONN_PCCL_INTERFACES", "none0")
    (check,) = doctor._pccl()
    assert check.state == "problem" and "none0" in check.detail
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("named", [True, False])
def test_a_lock_that_a_killed_build_left_is_named(tmp_path, monkeypatch, capsys, named):
    root = tmp_path if named else tmp_path / "torch_extensions" / "py311_cpu"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    if named:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (root / "cpu_adam").mkdir(parents=True)
    baton = FileBaton(str(root / "cpu_adam" / "lock"))
    assert baton.try_acquire()  # a build that goes on
    assert [check.state for check in doctor._build_locks()] == ["ok"]
    os.close(baton.fd)  # its process is gone
    (check,) = doctor._build_locks()
    assert check.state == "problem" and str(root / "cpu_adam" / "lock") in check.detail and not check.core
    monkeypatch.setenv("LOCAL_RANK", "1")
    build_locks.warn()
    assert not capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "0")
    build_locks.warn()
    assert str(root / "cpu_adam" / "lock") in capsys.readouterr().err
    # Accelerate has DeepSpeed build a kernel before any configuration is looked at.
    config = tmp_path / "ds_config.json"
    config.write_text('{"axonn": {}}')
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(config))
    assert accelerate_patch._on_cpu(lambda self, cpu: (None, "kind"))(None) == ("gloo", "kind")
    assert str(root / "cpu_adam" / "lock") in capsys.readouterr().err
