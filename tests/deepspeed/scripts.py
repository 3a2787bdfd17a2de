"""Run training scripts as users do: a process for each rank, or ranks forked from one that has imported DeepSpeed."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axonn_plugins.cluster.launch import free_port

os.environ.setdefault("DS_ACCELERATOR", "cpu")
NO_KERNEL = "deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False"
"""For a script: without a kernel for inference alone, which takes a minute to compile."""
_STARTER = """
import os
codes = os.fdopen(os.dup(1), 'w')
os.dup2(2, 1)  # what imports say is no exit code
import gc, json, runpy, sys
import deepspeed, torch, torch._dynamo
import deepspeed.compile.backend, deepspeed.module_inject.auto_ep_layer, deepspeed.runtime.zero.muon.muon_optimizer
gc.collect()
gc.freeze()  # else each child copies what it looks through
for line in sys.stdin:
    folder, variables = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.environ.update(variables)
        sys.path[0] = folder
        for number, name in ((1, 'stdout'), (2, 'stderr')):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        code = 1
        try:
            runpy.run_path('train.py', run_name='__main__')
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if code and code is not end.code:
                print(end.code, file=sys.stderr)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)  # an interpreter's end takes as long as all that a short script does
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=codes, flush=True)
"""


def environment(ranks: int = 1, rank: int = 0, port: int | None = None, **changes: str) -> dict[str, str]:
    """The environment that torchrun gives a rank."""
    dropped = ("AXONN_PLUGINS", "TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTHONPATH")
    found = {key: value for key, value in os.environ.items() if key not in dropped}
    found |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    return found | {"MASTER_PORT": str(port or free_port()), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | changes


def run_script(folder: Path, text: str, ranks: int = 1, **changes: str) -> list[subprocess.CompletedProcess[str]]:
    """Each rank a fresh interpreter in `folder`, which holds nothing of ours."""
    script = folder / "train.py"
    script.write_text(text)
    port = free_port()
    running = [
        subprocess.Popen(
            [sys.executable, str(script)],
            cwd=folder,
            env=environment(ranks, rank, port, **changes),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    ended = []
    try:
        for process in running:
            out, err = process.communicate()
            ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in running:
            process.kill()
    return ended


@contextmanager
def starter(**changes: str) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs scripts one after the other, each as a fresh interpreter would that has imported torch and DeepSpeed first, and nothing else.

    Args:
        changes: of that interpreter's environment.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _STARTER],
        env=environment(**changes),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None

    def run(folder: Path, text: str, **changes: str) -> subprocess.CompletedProcess[str]:
        (folder / "train.py").write_text(text)
        print(json.dumps([str(folder), environment(**changes)]), file=process.stdin, flush=True)
        code = int(process.stdout.readline())
        return subprocess.CompletedProcess(
            "train.py", code, *((folder / f"std{to}").read_text() for to in ("out", "err"))
        )

    try:
        yield run
    finally:
        process.stdin.close()
        process.wait()


def fork_script(folder: Path, text: str, ranks: int, limit: float = 240.0) -> tuple[list[int], list[str], float]:
    """Exit codes and stderr of ranks that run a script, forked from this process to save the imports, and the seconds."""
    script = folder / "train.py"
    script.write_text(text)
    port, started = free_port(), time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    children = {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            _become_rank(script, rank, environment(ranks, rank, port))
        children[child] = rank
    codes, waiting = [0] * ranks, dict(children)
    while waiting:
        for child in list(waiting):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[waiting.pop(child)] = os.waitstatus_to_exitcode(status)
        if time.monotonic() - started > limit:
            for child in waiting:
                os.kill(child, 9)
            limit = float("inf")
        time.sleep(0.02)
    errors = [(folder / f"stderr.{rank}").read_text() for rank in range(ranks)]
    return codes, errors, time.monotonic() - started


def _become_rank(script: Path, rank: int, variables: dict[str, str]) -> None:
    """Never returns: what the interpreter does with a script, down to sys.excepthook."""
    code = 1
    try:
        handle = os.open(script.with_name(f"stderr.{rank}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stderr, sys.stdout, sys.excepthook = os.fdopen(2, "w"), os.fdopen(1, "w"), sys.__excepthook__
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(script.parent)
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stderr.flush()
        os._exit(code)


def one_sentence(message: str) -> bool:
    """No line break, and nothing that ends a sentence before the end."""
    return "\n" not in message and not re.search(r"[.!?]\s+[A-Z]", message) and not message.endswith((".", " "))


def sentences(stderr: str) -> list[str]:
    """Sentences of ours that the ranks were told."""
    return [line.removeprefix("axonn: error: ") for line in stderr.splitlines() if line.startswith("axonn: error: ")]


def last_line(result: Any) -> str:
    """The last line that a rank printed."""
    assert result.returncode == 0, result.stderr
    return str(result.stdout.strip().splitlines()[-1])
