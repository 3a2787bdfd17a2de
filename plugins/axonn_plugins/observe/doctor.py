"""`axonn doctor`: what of the suite and its hosts works in this environment, and what to do about the rest.

Only the standard library is imported at the top, and every check turns what goes wrong into a row, so that a broken
installation is reported instead of raised.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from axonn_plugins import processors
from axonn_plugins.observe.clock import elapsed

State = Literal["ok", "missing", "problem", "optional-missing"]

# The same bounds as setup.cfg; a test holds them together.
REQUIRED = {"torch": (2, 8), "deepspeed": (0, 16), "pydantic": (2,)}
BELOW = {"deepspeed": (0, 20)}
HOSTS = {
    "megatron-core": ((0, 16), (0, 21)),
    "transformers": ((5,), (6,)),
    "accelerate": ((1,), (2,)),
    "peft": ((0, 18), (0, 22)),
    "trl": ((1,), (2,)),
    "lightning": ((2, 5), (2, 7)),
}
"""From which version of a host on, and below which: parts of them are replaced."""
MEGATRON_FROM, MEGATRON_BELOW = HOSTS["megatron-core"]

_INSTALL = "run `make setup` in the checkout of axonn-plugins, or pip install that folder"
_PROBE_SECONDS = 120

_EXTRAS = {"matplotlib": "plots", "tensorboard": "tensorboard", "triton": "triton"}
"""Optional parts, and the extra of axonn-plugins that installs each."""

_GLOO_PROBE = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
ones = torch.ones(1)
dist.all_reduce(ones)
dist.destroy_process_group()
"""

_NAMES_PROBE = """
from axonn_plugins import __file__, names
print(__file__)
for name in names.PACKAGES:
    if found := names.hidden(name):
        print(name, "is", found)
"""


@dataclass(frozen=True)
class Check:
    """One row of the report.

    Attributes:
        name: What was looked at.
        state: "missing" and "problem" are worth acting on, "optional-missing" is not unless you want the part.
        detail: What was found.
        remedy: What to do about a problem or a missing part.
        core: Whether nothing works without it, so that the exit code tells.
    """

    name: str
    state: State
    detail: str
    remedy: str = ""
    core: bool = True


def report() -> list[Check]:
    """Look at everything; takes a few seconds, because torch is imported and a process group is tried."""
    core = [_versions, _entry_point, _package_found, _devices, _gloo]
    rest = [_other_backends, _pccl, _compiler, _build_locks, _hosts, _megatron_checkout, _apex, _optional_parts]
    return [check for section in core + rest for check in _guarded(section, core=section in core)]


def main(as_json: bool = False) -> int:
    """Print the report, as text or as one JSON object; 0 when what the core needs is there, 1 otherwise."""
    with elapsed("looking at what is here"):
        checks = report()
    broken = [check.name for check in checks if check.core and check.state in ("missing", "problem")]
    if as_json:
        print(json.dumps({"ready": not broken, "checks": [asdict(check) for check in checks]}, indent=1))
        return 1 if broken else 0
    names, states = max(len(check.name) for check in checks), max(len(check.state) for check in checks)
    for check in checks:
        print(f"{check.name:<{names}}  {check.state:<{states}}  {check.detail}")
        if check.remedy:
            print(f"{'':<{names}}  {'':<{states}}  -> {check.remedy}")
    print("", f"The core is not ready: {', '.join(broken)}." if broken else "The core is ready.", sep="\n")
    return 1 if broken else 0


def _guarded(section: Callable[[], Iterable[Check]], core: bool) -> list[Check]:
    try:
        return list(section())
    except Exception as error:
        name = section.__name__.strip("_").replace("_", " ")
        return [Check(name, "problem", f"{type(error).__name__}: {_last_line(str(error))}", core=core)]


def _versions() -> Iterable[Check]:
    ours = _installed_version("axonn-plugins")
    if ours is None:
        yield Check("axonn-plugins", "missing", "found by path, but not installed", _INSTALL)
    else:
        yield Check("axonn-plugins", "ok", ours)
    yield _against("Python", platform.python_version(), (3, 10))
    for name, least in REQUIRED.items():
        version = _installed_version(name)
        if version is None:
            yield Check(name, "missing", "not installed", f"pip install '{name}>={_dotted(least)}'")
        else:
            yield _against(name, version, least)
            if name in BELOW and _numbers(version) >= BELOW[name]:
                yield Check(f"{name}'s newest", "problem", *_untried(name, version, least, BELOW[name]), core=False)


def _untried(name: str, version: str, least: tuple[int, ...], below: tuple[int, ...]) -> tuple[str, str]:
    wanted = f"{name}>={_dotted(least)},<{_dotted(below)}"
    return f"{version} was not tried, and parts of it are replaced", f"pip install '{wanted}'"


def _against(name: str, version: str, least: tuple[int, ...]) -> Check:
    if _numbers(version) >= least:
        return Check(name, "ok", version)
    return Check(name, "problem", f"{version} is too old", f"install {name} {_dotted(least)} or newer")


def _hosts() -> Iterable[Check]:
    for name, (least, below) in HOSTS.items():
        version = _installed_version(name)
        if version is None:
            wanted = f"pip install '{name}>={_dotted(least)},<{_dotted(below)}'"
            yield Check(name, "optional-missing", "not installed; needed for training with it", wanted, core=False)
        elif least <= _numbers(version) < below:
            yield Check(name, "ok", version, core=False)
        else:
            yield Check(name, "problem", *_untried(name, version, least, below), core=False)


def _entry_point() -> Iterable[Check]:
    name, by_hand = "activation", "or call axonn_plugins.activate() at the top of the training script"
    found = importlib.metadata.entry_points(group="torch.backends", name="axonn")
    if not found:
        detail = 'no entry point is installed: the "axonn" block would be ignored'
        yield Check(name, "problem", detail, f"{_INSTALL}, {by_hand}")
    elif os.environ.get("AXONN_PLUGINS") == "0":
        yield Check(name, "problem", "switched off by AXONN_PLUGINS=0", "unset AXONN_PLUGINS")
    elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        detail = "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading entry points"
        yield Check(name, "problem", detail, f"unset it, {by_hand}")
    else:
        yield Check(name, "ok", "armed by `import torch`, with no line in the training script")


def _package_found() -> Iterable[Check]:
    """A new Python here must find our packages: the working directory comes first, and `samo` is not a rare name."""
    name, ours = "packages", Path(__file__).resolve().parent
    probe = _python(_NAMES_PROBE)
    found, *hidden = probe.stdout.splitlines() or [""]
    if probe.returncode:
        yield Check(name, "problem", f"a Python started here cannot import ours: {_last_line(probe.stderr)}", _INSTALL)
    elif Path(found).resolve().parent != ours.parent:
        remedy = "rename that one, run from elsewhere, or put ours first in PYTHONPATH"
        yield Check(name, "problem", f"a Python started here finds {found}, not {ours.parent}", remedy)
    elif hidden:
        remedy = "rename yours or run from elsewhere; keys of the block that do not need it work as they are"
        yield Check(name, "problem", f"a Python started here finds another package: {'; '.join(hidden)}", remedy)
    else:
        yield Check(name, "ok", str(ours.parent))


def _devices() -> Iterable[Check]:
    import torch

    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    native = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    yield Check("CPU", "ok", f"{processors.usable()} cores, bf16 {'in hardware' if native else 'emulated'}")
    if not torch.cuda.is_available():
        yield Check("CUDA", "optional-missing", "no device; training runs on the CPU", core=False)
        return
    for index in range(torch.cuda.device_count()):
        bf16 = torch.cuda.get_device_capability(index) >= (8, 0) or torch.version.hip is not None
        detail = f"{torch.cuda.get_device_name(index)}, {'bf16' if bf16 else 'no bf16'}"
        yield Check(f"CUDA device {index}", "ok", detail, core=False)


def _gloo() -> Iterable[Check]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            probe = _python(_GLOO_PROBE, str(Path(folder, "store")), cwd=folder)
        except subprocess.TimeoutExpired:
            detail = f"a group of one rank did not answer in {_PROBE_SECONDS} s"
            yield Check("backend gloo", "problem", detail, "name a working interface in GLOO_SOCKET_IFNAME")
            return
    if probe.returncode == 0:
        yield Check("backend gloo", "ok", "a group of one rank works")
    else:
        yield Check("backend gloo", "problem", _last_line(probe.stderr), "check the torch installation")


def _other_backends() -> Iterable[Check]:
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    backends = {"nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available(), "ucc": dist.is_ucc_available()}
    for name, built in backends.items():
        if built:
            yield Check(f"backend {name}", "ok", "in this build of torch", core=False)
        elif name == "nccl" and cuda:
            detail = "not in this build of torch, and there are CUDA devices"
            yield Check("backend nccl", "problem", detail, "install a build of torch with NCCL")
        else:
            yield Check(f"backend {name}", "optional-missing", "not in this build of torch", core=False)


def _pccl() -> Iterable[Check]:
    """Nothing is compiled here."""
    from axonn_plugins.pccl.build import BuildError, compiler, place
    from axonn_plugins.pccl.interfaces import addresses_of
    from axonn_plugins.pccl.options import Options

    name = "backend pccl"
    try:
        options = Options.from_environment()
        address = " and ".join(addresses_of(options.interfaces, int(os.environ.get("LOCAL_RANK", 0))))
    except ValueError as error:
        yield Check(name, "problem", str(error), "correct the variables AXONN_PCCL_*", core=False)
        return
    built = place()
    try:
        command = compiler()
    except BuildError:
        command = None
    if built.exists():
        yield Check(name, "ok", f"compiled ({built}), would listen at {address}", core=False)
    elif command:
        detail = f"to be compiled by {command} when first used, would listen at {address}"
        yield Check(name, "ok", detail, core=False)
    else:
        yield Check(name, "optional-missing", "not compiled, and no C++ compiler", "apt-get install g++", core=False)


def _compiler() -> Iterable[Check]:
    candidates = (os.environ.get("CXX"), "c++", "g++", "clang++")
    found = next((path for name in candidates if name and (path := shutil.which(name))), None)
    if found:
        yield Check("C++ compiler", "ok", found, core=False)
    else:
        detail = "none; only parts that compile when first used need one"
        yield Check("C++ compiler", "optional-missing", detail, "apt-get install g++", core=False)


def _build_locks() -> Iterable[Check]:
    from axonn_plugins import build_locks

    name, found = "torch extensions", build_locks.abandoned()
    for lock in found:
        detail = f"{lock} was left by a build that was killed: every start that needs it waits for ever"
        yield Check(
            name, "problem", detail, f"rm {lock}, unless another machine is building in that folder", core=False
        )
    if not found:
        yield Check(name, "ok", f"no build was left unfinished in {build_locks.folder()}", core=False)


def _apex() -> Iterable[Check]:
    """Look for files, without importing: PyPI's apex is a web toolkit that need not even import."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        yield Check("NVIDIA apex", "optional-missing", "not installed; not on PyPI, see NVIDIA/apex", core=False)
    elif any(Path(place, "optimizers/fused_adam.py").exists() for place in spec.submodule_search_locations or []):
        yield Check("NVIDIA apex", "ok", "apex.optimizers.FusedAdam", core=False)
    else:
        detail = "the installed `apex` has no apex.optimizers.FusedAdam: PyPI's apex is another project"
        yield Check("NVIDIA apex", "problem", detail, "pip uninstall apex, and build NVIDIA/apex if wanted", core=False)


def _optional_parts() -> Iterable[Check]:
    parts = {
        "triton": "triton",
        "transformer-engine": "transformer_engine",
        "mpi4py": "mpi4py",
        "wandb": "wandb",
        "tensorboard": "tensorboard",
        "matplotlib": "matplotlib",
    }
    for name, module in parts.items():
        if importlib.util.find_spec(module) is None:
            extra = f'; pip install "axonn-plugins[{_EXTRAS[name]}]"' if name in _EXTRAS else ""
            yield Check(name, "optional-missing", f"not installed{extra}", core=False)
        else:
            yield Check(name, "ok", _installed_version(name) or "installed", core=False)


def _megatron_checkout() -> Iterable[Check]:
    name, path = "Megatron-LM", os.environ.get("MEGATRON_LM_PATH")
    if not path:
        yield Check(name, "optional-missing", "MEGATRON_LM_PATH is not set; needed for pretrain_gpt.py", core=False)
    elif Path(path, "pretrain_gpt.py").exists():
        yield Check(name, "ok", path, core=False)
    else:
        remedy = "point MEGATRON_LM_PATH at a checkout of NVIDIA/Megatron-LM"
        yield Check(name, "problem", f"no pretrain_gpt.py in {path}", remedy, core=False)


def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python(code: str, *arguments: str, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_PROBE_SECONDS)


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release.group().split(".")) if release else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


if __name__ == "__main__":
    raise SystemExit(main())
